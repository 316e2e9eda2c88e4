"""Runs dummy steps before serving, to compile every kernel and to measure how much memory the largest step takes.

A GPU kernel is compiled for the arguments of its first call: the number format, tiles that suit the number of rows, and
whether each size is 1, a multiple of 16 or neither. The dummy steps therefore cover every kind of step that requests
can cause. All pages of their sequences are the scratch page.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.kv_cache.sizing import GpuMemory, PoolBudget, page_size
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model_runner.cuda_graph_inputs import MOST_TOKENS, Shapes
from worker.model_runner.inputs import dummy_sequence
from worker.model_runner.runner import Runner
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Chunk, Plan, Sequence

GREEDY = Sampling(1, temperature=0.0)
PLAIN = Sampling(1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)  # samples from unadjusted logits
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
    PLAIN,
    Sampling(1, temperature=0.0, repetition_penalty=1.1),
    Sampling(1, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(1, temperature=0.0, logit_bias=((0, 1.0),)),
    Sampling(1, temperature=0.0, logprobs=0),
    Sampling(1, logprobs=5),
    EVERYTHING,
)
PROMPT_LOGPROBS = Sampling(1, temperature=0.0, logprobs=2, prompt_logprobs=True)  # needs the logits of every row
MULTIPLES_OF_16 = (16, 64, 256)  # sizes() returns these besides its geometric sizes
FEW_ROWS, FEW_TOKENS = (1, 3, 16, 67), (19, 131, 512)  # sizes of steps, for kinds of steps that need only a few sizes
PROMPT_LOGPROBS_TOKENS = (16, 40, 100, 200, 512)  # lengths of prompts with log-probabilities
FULL_PROMPTS = 32  # the maximum number of prompts in StepLimits.full()
LONG_CONTEXT = 1100  # computed tokens before a step: enough that attention splits the context


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a step. The methods make plans of dummy steps within these limits."""

    sequences: int
    tokens: int
    length: int  # the maximum tokens of a sequence
    page_size: int
    groups: int  # how many groups of layers have page tables

    @classmethod
    def of(cls, worker: WorkerConfig, length: int, groups: int = 1) -> "StepLimits":
        """Makes the limits. Without chunked prefill, the last prompt of a step may exceed its token budget."""
        beyond = 0 if worker.use_chunked_prefill else length - 1
        tokens = min(worker.max_step_tokens + beyond, worker.max_batch_size * length)
        return cls(worker.max_batch_size, tokens, length, page_size(length, worker), groups)

    def dummy(self, length: int, sampling: Sampling) -> Sequence:
        return dummy_sequence([0] * length, self.page_size, self.groups, sampling)

    def decodes(self, count: int, after: int, *samplings: Sampling) -> Plan:
        """Plans a decode of `count` sequences, each after `after` computed tokens. Both numbers are cut to the limits.

        samplings: the sequences use them in turn. Without samplings, the decodes are greedy.
        """
        length = min(after + 1, self.length)
        kinds = [self.dummy(length, sampling) for sampling in samplings or (GREEDY,)]
        return Plan([Chunk(kinds[i % len(kinds)], length - 1, 1, True) for i in range(min(count, self.sequences))])

    def chunk(self, tokens: int, after: int, sampling: Sampling = GREEDY) -> Plan:
        """Plans `tokens` tokens of a prompt after `after` computed tokens. Both numbers are cut to the limits."""
        tokens = min(tokens, self.tokens, self.length)
        after = min(after, self.length - tokens)
        return Plan([Chunk(self.dummy(after + tokens, sampling), after, tokens, True)])

    def full(self, decodes: int) -> Plan:
        """Plans a step with the maximum number of tokens: `decodes` decodes, and prompts as long as possible."""
        chunks = list(self.decodes(decodes, LONG_CONTEXT).chunks)
        left = self.tokens - len(chunks)
        for _ in range(min(FULL_PROMPTS, max(1, self.sequences - len(chunks)))):
            if left > 0:
                chunks += self.chunk(left, 0).chunks
                left -= chunks[-1].length
        return Plan(chunks)

    def largest(self) -> Plan:
        """Plans the step that needs the most memory.

        It has the maximum number of sequences, all of the maximum length, and the maximum number of tokens. Every row
        goes through every stage of sampling.
        """
        sequence, left = self.dummy(self.length, EVERYTHING), self.tokens
        chunks: list[Chunk] = []
        for others in reversed(range(self.sequences)):
            length = max(1, min(self.length, left - others))
            chunks.append(Chunk(sequence, self.length - length, length, True))
            left -= length
        return Plan(chunks)


def sizes(most: int) -> list[int]:
    """Returns sizes from 1 to `most`, and multiples of 16.

    Each size is at most a quarter greater than the one before (or 1 greater), so that the sizes between two of them
    need no other tiles.
    """
    result = [1]
    while result[-1] < most:
        result.append(min(most, max(result[-1] + 1, result[-1] * 5 // 4)))
    return sorted({*result, *(size for size in MULTIPLES_OF_16 if size <= most)})


def steps(limits: StepLimits) -> Iterator[Plan]:
    """Yields steps that together compile every kernel that requests can need, the simplest first."""
    for rows in sizes(limits.sequences):
        yield limits.decodes(rows, 0)
    for tokens in sizes(min(limits.tokens, limits.length)):
        yield limits.chunk(tokens, 0)
    for rows in FEW_ROWS:
        yield limits.decodes(rows, LONG_CONTEXT)
    for tokens in FEW_TOKENS:
        yield limits.chunk(tokens, LONG_CONTEXT)
    yield Plan([*limits.decodes(2, LONG_CONTEXT).chunks, *limits.chunk(40, 7).chunks])
    for decodes in (0, 40):  # the kernels that list attention's work are compiled for few and for many sequences
        yield limits.full(decodes)
    for sampling in SAMPLINGS:
        for rows in FEW_ROWS[:3]:
            yield limits.decodes(rows, 5, sampling)
    yield limits.decodes(len(SAMPLINGS), 5, *SAMPLINGS)
    for tokens in PROMPT_LOGPROBS_TOKENS:
        yield limits.chunk(tokens, 0, PROMPT_LOGPROBS)


class PlanRunner(Protocol):
    def step(self, plan: Plan) -> object: ...


def warm_up(runner: PlanRunner, plans: Iterable[Plan], on_progress: Callable[[], None]) -> None:
    """Runs the plans one after another, and calls `on_progress` after each. Catches no exception of the device."""
    for plan in plans:
        runner.step(plan)
        on_progress()


class MemoryGauge(Protocol):
    """Measures the memory of a device; see worker/kv_cache/sizing.py."""

    def read(self) -> GpuMemory: ...
    def start_measurement(self) -> None: ...
    def measured_growth(self) -> int: ...


def profile_memory(
    decoder: Decoder, worker: WorkerConfig, length: int, memory: MemoryGauge, on_progress: Callable[[], None]
) -> PoolBudget:
    """Compiles every kernel for sequences of up to `length` tokens, and measures how much memory the K/V pool can have.

    The K/V cache for this is only a scratch page and a scratch slot, which are freed afterwards.
    Raises torch.OutOfMemoryError when the largest step does not fit in the memory that the weights leave.
    """
    limits = StepLimits.of(worker, length)
    embed = decoder.weights.embed
    kv_dtype = kv_format(worker.kv_cache_dtype, embed.dtype)
    cache = KVCache(
        decoder.spec, (1,), limits.page_size, kv_dtype, embed.device, state_slots=1, state_dtype=embed.dtype
    )
    runner = Runner(decoder, cache)
    warm_up(runner, steps(limits), on_progress)
    peaks = []
    prompt = limits.chunk(worker.max_step_tokens, limits.length, PROMPT_LOGPROBS)
    decodes, mixed = limits.decodes(limits.sequences, limits.length, PLAIN), limits.chunk(MOST_TOKENS, limits.length)
    for plan in (decodes, mixed, limits.largest(), prompt):
        memory.start_measurement()
        runner.step(plan)
        peaks.append(memory.measured_growth())
        on_progress()
    del runner
    decoding, mixing, *largest = peaks
    logits = 4 * decoder.spec.vocab_size * Shapes(worker.max_batch_size, worker.max_step_tokens, length).most_rows
    return memory.read().pool_budget(max(largest), decoding + mixing + logits)
