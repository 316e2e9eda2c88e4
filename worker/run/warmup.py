"""Steps for nobody, before anybody is served: they have every kernel compiled, and show what the largest step takes.

A GPU's kernels are compiled for what they are first called with: a number format, tiles that suit the number of rows,
and whether a size is 1, a multiple of 16 or neither. So the steps here are of all kinds that requests can cause. They
compute in the scratch page alone: their sequences' pages are all that one, whatever their length.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.config import WorkerConfig
from shared.messages import Sampling
from worker.kv_cache.sizing import GpuMemory, PoolBudget, page_size
from worker.kv_cache.tensors import Cache, kv_format
from worker.model.decoder import Decoder
from worker.run.inputs import dummy_sequence
from worker.run.runner import Runner
from worker.schedule.sequence import Chunk, Plan, Sequence

GREEDY = Sampling(1, temperature=0.0)
CHOSEN = Sampling(1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)  # by the logits alone
EVERYTHING = Sampling(
    1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logit_bias=((0, 1.0),), min_tokens=1, logprobs=20,
)  # fmt: skip
SAMPLINGS = (
    GREEDY,
    Sampling(1),
    Sampling(1, top_p=0.9),
    Sampling(1, top_k=40),
    Sampling(1, min_p=0.05),
    Sampling(1, top_p=0.9, top_k=40),
    CHOSEN,
    Sampling(1, temperature=0.0, repetition_penalty=1.1),
    Sampling(1, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(1, temperature=0.0, logit_bias=((0, 1.0),)),
    Sampling(1, temperature=0.0, logprobs=0),
    Sampling(1, logprobs=5),
    EVERYTHING,
)
PROMPT = Sampling(1, temperature=0.0, logprobs=2, prompt_logprobs=True)  # logits of every row
EVEN = (16, 64, 256)  # sizes that are multiples of 16, beside those of sizes()
FEW_ROWS, FEW_TOKENS = (1, 3, 16, 67), (19, 131, 512)  # of the first few decodes and prompts
PROMPTED = (16, 40, 100, 200, 512)  # tokens of prompts whose own probabilities are asked for
FIRST_ROWS = (1, 2, 4, 8)
FAR = 1100  # tokens before a step: more than one split of attention


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest that a step can be; makes the plans of steps within that."""

    sequences: int
    tokens: int
    length: int  # tokens of a sequence
    page_size: int

    @classmethod
    def of(cls, worker: WorkerConfig, length: int) -> "Bounds":
        """Where prompts are not cut, the last one of a step may exceed the budget."""
        beyond = 0 if worker.use_chunked_prefill else length - 1
        tokens = min(worker.max_step_tokens + beyond, worker.max_batch_size * length)
        return cls(worker.max_batch_size, tokens, length, page_size(length, worker))

    def nobody(self, length: int, sampling: Sampling) -> Sequence:
        return dummy_sequence([0] * length, self.page_size, sampling)

    def decodes(self, count: int, after: int, *samplings: Sampling) -> Plan:
        """The token after `after` others of each of `count` sequences; less of both where bounds say so.

        `samplings` are given to them in turn; none: greedy.
        """
        length = min(after + 1, self.length)
        kinds = [self.nobody(length, sampling) for sampling in samplings or (GREEDY,)]
        return Plan([Chunk(kinds[i % len(kinds)], length - 1, 1, True) for i in range(min(count, self.sequences))])

    def chunk(self, tokens: int, after: int, sampling: Sampling = GREEDY) -> Plan:
        """The next `tokens` of a prompt of which `after` were computed before; less of both where bounds say so."""
        tokens = min(tokens, self.tokens, self.length)
        after = min(after, self.length - tokens)
        return Plan([Chunk(self.nobody(after + tokens, sampling), after, tokens, True)])

    def largest(self) -> Plan:
        """The step that needs most memory: all sequences as long as can be, all tokens of the budget, every row
        sampled in every way."""
        everybody, left = self.nobody(self.length, EVERYTHING), self.tokens
        chunks: list[Chunk] = []
        for others in reversed(range(self.sequences)):
            length = max(1, min(self.length, left - others))
            chunks.append(Chunk(everybody, self.length - length, length, True))
            left -= length
        return Plan(chunks)


def sizes(most: int) -> list[int]:
    """From 1 to `most`, each at most a quarter more than the last: between two of them no kernel changes its tiles."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 5 // 4)))
    return sorted({*found, *(even for even in EVEN if even <= most)})


def steps(bounds: Bounds) -> Iterator[Plan]:
    """Steps that between them compile every kernel that requests can need, from the simplest on."""
    for rows in sizes(bounds.sequences):
        yield bounds.decodes(rows, 0)
    for tokens in sizes(min(bounds.tokens, bounds.length)):
        yield bounds.chunk(tokens, 0)
    for rows in FEW_ROWS:
        yield bounds.decodes(rows, FAR)
    for tokens in FEW_TOKENS:
        yield bounds.chunk(tokens, FAR)
    yield Plan([*bounds.decodes(2, FAR).chunks, *bounds.chunk(40, 7).chunks])
    for sampling in SAMPLINGS:
        for rows in FEW_ROWS[:3]:
            yield bounds.decodes(rows, 5, sampling)
    yield bounds.decodes(len(SAMPLINGS), 5, *SAMPLINGS)
    for tokens in PROMPTED:
        yield bounds.chunk(tokens, 0, PROMPT)


def first_decodes(bounds: Bounds) -> Iterator[Plan]:
    """Decodes as the first few requests cause them, so that their CUDA graphs are recorded before they come."""
    for rows in FIRST_ROWS:
        yield bounds.decodes(rows, 8, CHOSEN)


class Steps(Protocol):
    def step(self, plan: Plan) -> object: ...


def warm_up(runner: Steps, plans: Iterable[Plan], moved: Callable[[], None]) -> None:
    """Runs them one after another; `moved` is called after each. Raises what the device raises."""
    for plan in plans:
        runner.step(plan)
        moved()


class MemoryGauge(Protocol):
    """A device's memory; see worker/kv_cache/gpu_memory.py."""

    def read(self) -> GpuMemory: ...
    def start_measurement(self) -> None: ...
    def measured_growth(self) -> int: ...


def profile_memory(
    decoder: Decoder, worker: WorkerConfig, length: int, memory: MemoryGauge, moved: Callable[[], None]
) -> PoolBudget:
    """Compiles every kernel for sequences of up to `length` tokens, and measures what steps leave for the pool.

    The cache is nothing but a scratch page, and is given back. Raises torch.OutOfMemoryError when the largest step does
    not fit beside the weights.
    """
    bounds = Bounds.of(worker, length)
    embed = decoder.weights.embed
    kept = kv_format(worker.kv_cache_dtype, embed.dtype)
    runner = Runner(decoder, Cache(decoder.spec, 1, bounds.page_size, kept, embed.device))
    warm_up(runner, steps(bounds), moved)
    taken = []
    prompted = bounds.chunk(worker.max_step_tokens, bounds.length, PROMPT)
    for plan in (bounds.decodes(bounds.sequences, bounds.length, CHOSEN), bounds.largest(), prompted):
        memory.start_measurement()
        runner.step(plan)
        taken.append(memory.measured_growth())
        moved()
    del runner
    decoding, *largest = taken
    return memory.read().pool_budget(max(largest), decoding)
