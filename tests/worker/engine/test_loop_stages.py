"""The loop with a step in flight for each stage of a model: the same messages as with one, whatever fails or leaves."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from shared import messages as m
from shared.wire import pack_u32
from tests.wire.harness import expected
from tests.worker.engine.harness import CONFIG, ME, Bench, check_only_one_failed, submit
from tests.worker.engine.test_loop_overlap import Device, Overlapped, mixture
from worker.scheduler.sequence import Chunk, Plan, Sequence


class InStages(Overlapped):
    """Asserts that no step needs an id that the host does not know."""

    def __init__(self, stages: int, check: Callable[[list[Chunk]], None] = lambda chunks: None) -> None:
        self.device = Device(check, ahead=lambda plan: stages - 1)
        Bench.__init__(self, runner=self.device, config=replace(CONFIG, pipeline_parallel_size=stages))
        self.most_in_flight = 0
        launch = self.device.launch

        def alone(plan: Plan, before: object) -> object:
            self.most_in_flight = max(self.most_in_flight, 1 + self.loop.in_flight)
            return launch(plan, None)

        self.device.launch = alone  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_steps_in_flight_change_no_message(stages: int) -> None:
    plain, bench = Bench(), InStages(stages)
    for one in (plain, bench):
        mixture(one)
        one.iterate(100)
    outputs, ends = plain.received()
    assert bench.received()[0] == outputs and bench.most_in_flight == stages
    assert {id: (end.outcome, end.tokens) for id, end in bench.received()[1].items()} == {
        id: (end.outcome, end.tokens) for id, end in ends.items()
    }
    assert bench.scheduler.status.prefill_tokens == plain.scheduler.status.prefill_tokens
    assert sum(bench.runner.steps) == sum(plain.runner.steps), "no row is computed in vain"


def test_oldest_step_is_read_if_nothing_can_be_launched() -> None:
    bench = InStages(3)
    bench.send(submit(1, [1], 3), submit(2, [2], 3))
    bench.drain()
    assert bench.device.events == [
        ("launch", 1), ("read", 1), ("launch", 2), ("launch", 3), ("read", 2), ("launch", 4), ("read", 3),
        ("launch", 5), ("read", 4), ("read", 5),
    ]  # fmt: skip
    assert bench.received()[0] == {1: expected([1], 3), 2: expected([2], 3)}


@pytest.mark.parametrize("culprit", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_failing_step_fails_only_the_culprit(culprit: int, late: bool) -> None:
    """The failure shows when the step is launched, or when it is read while other steps are in flight behind it."""

    def trouble(chunks: list[Chunk]) -> None:
        if any(one.sequence.key == (ME, culprit) and one.start + one.length == 22 for one in chunks):
            raise RuntimeError("unlucky")

    bench = InStages(3) if late else InStages(3, trouble)
    if late:
        bench.device.trouble = trouble
    bench.send(*(submit(i, [i + 1] * 20) for i in range(6)))
    bench.drain()
    assert bench.most_in_flight == 3
    check_only_one_failed(bench, culprit)


def test_out_of_memory_in_one_of_several_steps_fails_no_request() -> None:
    def check(chunks: list[Chunk]) -> None:
        if sum(chunk.length for chunk in chunks) > 30:
            raise MemoryError("too large")

    bench = InStages(3, check)
    bench.send(submit(1, [1] * 200), submit(2, [2] * 100), submit(3, [3]))
    bench.drain()
    outputs, ends = bench.received()
    assert outputs == {1: expected([1] * 200, 5), 2: expected([2] * 100, 5), 3: expected([3], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}


def test_crash_journal_records_the_sequences_of_all_steps_in_flight() -> None:
    bench = InStages(3)
    named: list[set[int]] = []
    record = bench.request_table.crash_journal.record_step

    def note(sequences: list[Sequence]) -> None:
        named.append({sequence.key[1] for sequence in sequences})
        record(sequences)

    bench.request_table.crash_journal.record_step = note  # type: ignore[method-assign]
    bench.send(*(submit(i, [i + 1], 2) for i in range(3)))
    bench.drain()
    assert named == [{0, 1, 2}, {0}, {0, 1}, {0, 1, 2}]


def test_suspect_runs_with_nothing_in_flight() -> None:
    bench = InStages(3)
    launch, alone = bench.device.launch, list[int]()

    def noted(plan: Plan, before: object) -> object:
        if any(chunk.sequence.history.crashes for chunk in plan.chunks):
            alone.append(bench.loop.in_flight + len(plan.chunks))
        return launch(plan, before)  # type: ignore[arg-type]

    bench.device.launch = noted  # type: ignore[method-assign, assignment]
    bench.send(*(submit(i, [i + 1], 9) for i in range(4)))
    bench.iterate(5)
    assert bench.loop.in_flight == 2
    bench.send(m.Submit(9, pack_u32([10] * 40), m.Sampling(4), crashes=1))
    bench.drain()
    assert alone == [1]
    assert bench.received()[0] == {i: expected([i + 1], 9) for i in range(4)} | {9: expected([10] * 40, 4)}
