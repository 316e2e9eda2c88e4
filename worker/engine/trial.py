"""Measures how long this machine takes for a decoded token of a model, with a few layers of the model itself.

The layers are read from the model's files. If these hold only their headers, all weights are zeros, which take as long
as others. This does not hold for experts: of equal ones, a router chooses the same again and again, which then lie in
the processor's caches. Such models are not tried.
"""

import time
from array import array
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from shared.config.settings import Settings
from shared.messages import Sampling
from worker.device import threads_of
from worker.engine.build import make_runner
from worker.engine.numerics import Formats
from worker.kv_cache.sizing import PoolBudget, PoolSize, size_pool
from worker.kv_cache.tensors import KVCache
from worker.model_runner.inputs import dummy_sequence
from worker.model_runner.runner import Runner
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder, Weights
from worker.models.load import Loader, open_source
from worker.models.sharding import Stage
from worker.scheduler.sequence import Chunk, Plan, Sequence
from worker.spec import ModelSpec

GREEDY = Sampling(1, temperature=0.0)
FILLING = 0x3C  # of every K/V byte, which makes ordinary numbers in every format, but zeros of values in four bits
LAYER_BYTES = 400 << 20  # of the layers that are tried: more than the caches of most processors hold
SHORT, LONG, STEPS, ROUNDS = 32, 1024, 8, 9  # tokens of the sequences that are continued, steps of a try, tries
LEAST_CONTEXT = SHORT + STEPS + 2  # a model whose sequences are shorter cannot be tried
POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Trial:
    """step_s: seconds for a token at the beginning of a sequence. kv_byte_s: seconds that each byte of K/V adds."""

    step_s: float
    kv_byte_s: float


def measure(folder: Path, settings: Settings, formats: Formats, spec: ModelSpec) -> Trial:
    """Measures a model without experts on the CPU; it takes a few seconds. Raises CheckpointError."""
    torch.set_num_threads(threads_of(settings.worker))
    device = torch.device("cpu")
    with closing(open_source(folder, None)) as source:
        loader = Loader(source, spec, formats.dtype, device, settings.worker.batch_invariant, formats.memory)
        nbytes = loader.bytes_of_layers()
        kinds = [(layer.recurrent, layer.mixer, layer.feed_forward) for layer in spec.layers]
        least = 1 + max(kinds.index(kind) for kind in kinds)  # so many layers have one of each kind
        count = next((n for n in range(least + 1, len(nbytes)) if sum(nbytes[:n]) >= LAYER_BYTES), len(nbytes))
        loader.stage = Stage(0, tuple(sorted({0, count, len(nbytes)})))
        weights = loader.load()
    whole, half = (
        _Cut(weights, loader.stage.spec(spec), n, settings, formats) for n in (count, max(least, count // 2))
    )
    last = min(LONG, whole.size.max_seq_len - STEPS - 2)
    tries = [(whole.step_s(SHORT), half.step_s(SHORT), whole.step_s(last)) for _ in range(ROUNDS)]
    short, fewer, long = (median(times) for times in zip(*tries, strict=True))
    tried, in_half = sum(nbytes[:count]), sum(nbytes[: half.count])
    a_byte = max(short - fewer, 0.0) / max(tried - in_half, 1)
    kv_bytes = whole.kv_bytes(last) - whole.kv_bytes(SHORT)
    return Trial(short + a_byte * (sum(nbytes) - tried), max(long - short, 0.0) / max(kv_bytes, 1))


class _Cut:
    """The first `count` layers of loaded weights, ready to decode one sequence."""

    def __init__(self, weights: Weights, spec: ModelSpec, count: int, settings: Settings, formats: Formats) -> None:
        self.count = count
        own = Stage(0, tuple(sorted({0, count, len(spec.layers)}))).spec(spec)
        budget = PoolBudget(POOL_BYTES, "")
        device, worker = torch.device("cpu"), settings.worker
        self.size = size_pool(own, formats.kv_dtype, device, budget, settings.model, worker, formats.dtype)
        size = self.size
        cache = KVCache(
            own, size.pages, size.page_size, formats.kv_dtype, device, size.groups, size.state_slots, formats.dtype
        )
        decoder = Decoder(own, replace(weights, layers=weights.layers[:count]), size.max_seq_len)
        self._runner = make_runner(fastest_decoder(decoder, cache), cache, worker, on_gpu=False)
        self._vocab_size = own.vocab_size

    def kv_bytes(self, tokens: int) -> int:
        """Returns how many bytes of K/V a step reads behind so many tokens."""
        groups = zip(self.size.groups, self.size.page_bytes, strict=True)
        return sum(nbytes // self.size.page_size * min(tokens, group.window or tokens) for group, nbytes in groups)

    def step_s(self, tokens: int) -> float:
        """Decodes one sequence of so many tokens, and returns the seconds of a step."""
        length = tokens + STEPS + 1
        [sequence] = decoding(self._runner, self.size, self._vocab_size, 1, length)
        first, *others = [Plan([Chunk(sequence, at, 1, True)]) for at in range(length - STEPS - 1, length)]
        self._runner.launch(first).read()
        begun = time.perf_counter()
        for plan in others:
            self._runner.launch(plan).read()
        return (time.perf_counter() - begun) / STEPS


def decoding(runner: Runner, size: PoolSize, vocab_size: int, count: int, length: int) -> list[Sequence]:
    """Makes `count` sequences of `length` random tokens. Their pages are filled with K/V, as if they were computed."""
    each = -(-length // size.page_size)
    cache = runner._cache  # filled directly, because no prompts are computed
    cache.reach([min(count * each, pages - 1) for pages in cache.pages])
    for part in (*cache.k, *cache.v):
        part[:, : 1 + count * each].view(torch.uint8).fill_(FILLING)
    sequences = [
        dummy_sequence(torch.randint(3, vocab_size, (length,)).tolist(), size.page_size, len(size.groups), GREEDY)
        for _ in range(count)
    ]
    for at, sequence in enumerate(sequences):
        sequence.pages = [_pages(at * each, each, pages) for pages in cache.pages]
    return sequences


def _pages(first: int, count: int, pages: int) -> "array[int]":
    """Returns `count` page ids. If a pool of `pages` pages has too few, as for windows, some ids occur repeatedly."""
    return array("i", [1 + page % (pages - 1) for page in range(first, first + count)])
