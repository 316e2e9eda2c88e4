"""A loop over a real runner on the CPU, the traffic that it serves, and the memory of a fake GPU."""

import random
from functools import cache
from pathlib import Path

import torch

from shared import messages as m
from shared.wire import pack_u32
from tests.checkpoints import EOS, VOCAB
from tests.worker.engine.harness import Bench
from worker.checkpoint.checkpoint import read_config
from worker.kv_cache.pages import PagePool
from worker.kv_cache.sizing import GIB, GpuMemory
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner.runner import Runner
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.quantization.methods import AS_STORED, InMemory
from worker.scheduler.policy import SchedulerConfig
from worker.structured_output.compiler import GrammarCompiler

MAX_SEQ_LEN = 128
SLOTS = 60  # slots for recurrent states


@cache
def batch_invariant_decoder(folder: Path, dtype: torch.dtype, memory: InMemory = AS_STORED) -> Decoder:
    spec = spec_from_config(read_config(folder))
    weights = load(folder, spec, dtype, torch.device("cpu"), invariant=True, memory=memory)
    return Decoder(spec, weights, MAX_SEQ_LEN)


class DrainedBench(Bench):
    """A loop that counts the steps in flight while it computes all requests."""

    max_in_flight = 0  # steps in flight after an iteration

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            super().iterate()
            self.max_in_flight = max(self.max_in_flight, self.loop.in_flight)


class RunnerBench(DrainedBench):
    """A loop over a real runner on the CPU."""

    def __init__(
        self,
        decoder: Decoder,
        pages: int = 100,
        compiler: GrammarCompiler | None = None,
        chunk: int = 64,
        cpu_vocab_size: int = 0,
        **options: bool,
    ) -> None:
        """pages: number of pages of each group of layers; chunk: the most tokens of a sequence in a step.

        cpu_vocab_size: the vocabulary whose draws the scheduler counts
        """
        groups = cache_groups(decoder.spec, MAX_SEQ_LEN, paged=True)
        dtype = decoder.weights.embed.dtype
        cache = KVCache(decoder.spec, [pages] * len(groups), 16, dtype, "cpu", groups, SLOTS, dtype)
        pools = [PagePool(pages, 16, group.window) for group in groups]
        runner = Runner(fastest_decoder(decoder, cache), cache, **options)  # type: ignore[arg-type]
        config = SchedulerConfig(
            max_seq_len=MAX_SEQ_LEN, eos_token_ids=frozenset({EOS}), max_step_tokens=64, prefill_chunk_size=chunk,
            state_checkpoint_tokens=20, cpu_vocab_size=cpu_vocab_size,
        )  # fmt: skip
        slots = PagePool(SLOTS, 16) if cache.states else None
        super().__init__(runner=runner, config=config, pools=pools, vocab_size=VOCAB, slots=slots, compiler=compiler)


PLAIN = [
    m.Sampling(20, temperature=0.0),
    m.Sampling(20, temperature=0.8, seed=3),
    m.Sampling(1, temperature=0.0),
    m.Sampling(25, temperature=1.2, top_k=9, seed=4),
    m.Sampling(25, temperature=3.0, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    m.Sampling(40, temperature=4.0, seed=7, stop_token_ids=tuple(range(0, VOCAB, 9))),
]


OTHERS = [
    m.Sampling(12, temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
    m.Sampling(8, temperature=2.0, seed=6, min_tokens=5, stop_token_ids=tuple(range(0, VOCAB, 3))),
    m.Sampling(9, temperature=0.7, seed=8, logprobs=2),
    m.Sampling(5, temperature=0.0, prompt_logprobs=True, logprobs=1),
    m.Sampling(9, temperature=1.0, seed=9, logit_bias=((7, 4.0),)),
]


def traffic(bench: DrainedBench, samplings: list[m.Sampling]) -> None:
    """Sends prompts of one token up to several chunks, one every third iteration."""
    draw = random.Random(1)
    for id, sampling in enumerate(samplings):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 5, 17, 64, 80]))]
        bench.send(m.Submit(id, pack_u32(prompt), sampling))
        bench.iterate(3)
    bench.drain()


def scores(bench: Bench) -> dict[tuple[int, int, bool], tuple[bytes, bytes]]:
    """Returns the scores of each token by request and offset: measured times decide how many a message has."""
    found: dict[tuple[int, int, bool], tuple[bytes, bytes]] = {}
    for _, step in bench.server.sent:
        for one in step.logprobs:
            for at in range(len(one.chosen) // 4):
                top = one.top_ids[4 * one.top * at : 4 * one.top * (at + 1)]
                found[one.id, one.start + at, one.prompt] = (one.chosen[4 * at : 4 * at + 4], top)
    return found


class Memory:
    """The memory of a fake GPU. takes: the growth that each measurement reports."""

    name = "Fake GPU"

    def __init__(self, free: int = 10 * GIB, total: int = 12 * GIB, takes: tuple[int, ...] = (1, 1, 2, 2)) -> None:
        self.device = GpuMemory(self.name, free, total, 0.9)
        self.takes = list(takes)
        self.marks = 0

    def read(self) -> GpuMemory:
        return self.device

    def start_measurement(self) -> None:
        self.marks += 1

    def measured_growth(self) -> int:
        return self.takes[self.marks - 1]
