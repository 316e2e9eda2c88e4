"""Measures how long a real model's steps take on this machine, for cost.fit.

It needs torch, so it is imported only for --calibrate. The K/V of contexts are really computed before steps are timed,
because memory that was never written maps to one shared page of zeros, which would be too fast to read.
"""

import random
import time
from array import array
from collections.abc import Callable, Iterable

import torch

from bench.simulate.cost import Observation
from shared.config.settings import Settings
from shared.messages import Sampling
from worker.device import threads_of
from worker.engine.build import Engine, load_engine
from worker.model_runner.inputs import use_scratch_slot
from worker.scheduler.sequence import Chunk, Plan, Sequence

BATCHES = (1, 8, 32)
CONTEXTS = (64, 256, 512, 1024)
CHUNKS = (16, 32, 64, 128, 256, 512)
ROUNDS = 4  # how often each step is timed; the shortest time counts, because other load only adds time

Progress = Callable[[str], None]  # called with a line of text for the user


def measure(settings: Settings, progress: Progress = lambda text: None) -> list[Observation]:
    """Loads `settings.model` and times its steps. Raises the errors of load_engine."""
    torch.set_num_threads(threads_of(settings.worker))
    progress(f"loading {settings.model.name}")
    return observe(load_engine(settings.model, settings.worker), progress)


def observe(engine: Engine, progress: Progress = lambda text: None) -> list[Observation]:
    """Times prompt chunks at the start, middle and end of a context, and decode steps of several batch sizes.

    Skips sizes that exceed the pool or the model's maximum sequence length.
    """
    longest = min(max(CONTEXTS), engine.limits.max_seq_len - 1, _capacity(engine))
    sequences = _sequences(engine, longest)
    _fill(engine, sequences, longest, progress)
    steps = [_timed(engine, plan) for plan in _plans(sequences, longest, progress)]
    for sequence in sequences:
        for pool, pages in zip(engine.pools, sequence.pages, strict=True):
            pool.release(pages)
    return steps


def _capacity(engine: Engine) -> int:
    """Returns the number of tokens that fit in every group's pool. Pages behind a window are not freed here."""
    return min(pool.usable * pool.page_size for pool in engine.pools)


def _sequences(engine: Engine, longest: int) -> list[Sequence]:
    rng, sequences, each = random.Random(0), list[Sequence](), engine.pools[0].pages_for(longest)
    for id in range(max(BATCHES)):
        if any(pool.available < each for pool in engine.pools):
            break
        tokens = [rng.randrange(engine.limits.vocab_size) for _ in range(longest)]
        sampling = Sampling(1, temperature=0.0, ignore_eos=True)
        sequence = Sequence((b"calibrate", id), tokens, longest, sampling, 0)
        sequence.pages = [array("i", pool.acquire(each) or []) for pool in engine.pools]
        use_scratch_slot(sequence)
        sequences.append(sequence)
    return sequences


def _fill(engine: Engine, sequences: list[Sequence], longest: int, progress: Progress) -> None:
    progress(f"computing {len(sequences)} contexts of {longest} tokens")
    size = max(CHUNKS)
    for sequence in sequences:
        for start in range(0, longest, size):
            engine.runner.step(Plan([Chunk(sequence, start, min(size, longest - start), True)]))


def _plans(sequences: list[Sequence], longest: int, progress: Progress) -> Iterable[Plan]:
    for size in (size for size in CHUNKS if size <= longest):
        progress(f"chunks of {size} tokens")
        for start in sorted({0, (longest - size) // 2, longest - size}):
            yield Plan([Chunk(sequences[0], start, size, True)])
    for batch in (batch for batch in BATCHES if batch <= len(sequences)):
        progress(f"decodes of {batch} sequences")
        for context in (context for context in CONTEXTS if context <= longest):
            yield Plan([Chunk(sequence, context - 1, 1, True) for sequence in sequences[:batch]])


def _timed(engine: Engine, plan: Plan) -> Observation:
    """Times a step and returns the shortest of ROUNDS times.

    Every chunk of the plan samples. So when the runner's step returns, the ids are on the host and the device is done.
    """
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        engine.runner.step(plan)
        seconds.append(time.perf_counter() - began)
    kv_tokens = sum(chunk.start + chunk.length for chunk in plan.chunks)
    return Observation(plan.tokens, kv_tokens, len(plan.chunks), min(seconds))
