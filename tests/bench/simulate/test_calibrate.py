"""The plans of a calibration read only K/V that an earlier plan has written."""

from typing import Any, cast

import pytest

from bench.simulate.calibrate import BATCHES, CHUNKS, CONTEXTS, observe
from shared.messages import Limits
from worker.engine.build import Engine
from worker.kv_cache.pages import PagePool
from worker.model_runner.step import StepOutput
from worker.scheduler.sequence import Plan


class Runner:
    """Records which sequence wrote each slot."""

    def __init__(self, page_size: int) -> None:
        self.written: dict[tuple[int, int], int] = {}
        self._size = page_size

    def step(self, plan: Plan) -> StepOutput:
        for chunk in plan.chunks:
            end = chunk.start + chunk.length
            assert end <= len(chunk.sequence.tokens) and max(chunk.sequence.tokens[:end]) < 50
            for position in range(end):
                slot = chunk.sequence.pages[0][position // self._size], position % self._size
                writer = self.written.setdefault(slot, chunk.sequence.key[1]) if position >= chunk.start else None
                assert writer in (None, chunk.sequence.key[1]), "two sequences share a slot"
                assert slot in self.written, f"position {position} is read before it was computed"
        return StepOutput([0] * len(plan.sampling))


def engine(pages: int, max_seq_len: int, page_size: int = 16) -> Engine:
    absent = cast(Any, None)
    runner = cast(Any, Runner(page_size))
    return Engine(
        runner=runner, scheduler=absent, pools=(PagePool(pages + 1, page_size),), size=absent, spec=absent,
        limits=Limits(max_seq_len, 50, ()), tokenizer_hash="", compiler=absent, device="cpu", dtype="", kernels="",
    )  # fmt: skip


def test_observe_times_decodes_of_every_batch_and_chunks_of_every_size() -> None:
    machine = engine(2048, 4096)
    steps = observe(machine)
    decodes = {(step.sequences, step.kv_tokens // step.sequences) for step in steps if step.tokens == step.sequences}
    assert decodes == {(batch, context) for batch in BATCHES for context in CONTEXTS}
    assert {step.tokens for step in steps if step.tokens > step.sequences} == set(CHUNKS)
    assert all(step.seconds > 0 for step in steps)
    assert machine.pools[0].counts().owned == 0


@pytest.mark.parametrize(("pages", "max_seq_len"), [(2048, 200), (70, 4096), (30, 4096)])
def test_observe_skips_what_the_machine_cannot_hold(pages: int, max_seq_len: int) -> None:
    machine = engine(pages, max_seq_len)
    steps = observe(machine)
    assert len(steps) >= 4
    assert max(step.kv_tokens for step in steps) <= pages * 16
    assert max(step.kv_tokens // step.sequences for step in steps) < max_seq_len
    assert machine.pools[0].counts().owned == 0
