"""The loop with overlapping steps sends the same messages as without overlap, whatever fails, ends or is aborted."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared import messages as m
from shared.wire import pack_u32
from tests.wire.harness import expected, next_id
from tests.worker.engine.harness import ME, YOU, Bench, FakeRunner, check_only_one_failed, submit
from worker.engine.transport import FrontendGone
from worker.model_runner.step import StepOutput
from worker.scheduler.sequence import Chunk, Plan, Sequence


@dataclass(eq=False)
class StepInFlight:
    """A step in flight, which may fail when it is read."""

    device: "Device"
    plan: Plan
    number: int
    tokens: dict[Sequence, list[int]]  # tokens of the sequences that sampled, including the new token
    steps_behind: int = 1

    def read(self) -> StepOutput:
        self.device.events.append(("read", self.number))
        self.device.trouble(self.plan.chunks)
        return StepOutput([self.tokens[chunk.sequence][-1] for chunk in self.plan.sampling])


@dataclass
class Device(FakeRunner):
    """A fake device: computes steps in the order of their launches, from ids that the host may not know yet."""

    events: list[tuple[str, int]] = field(default_factory=list)
    trouble: Callable[[list[Chunk]], None] = lambda chunks: None
    ahead: Callable[[Plan], bool] = lambda plan: True

    def launch(self, plan: Plan, before: StepInFlight | None) -> StepInFlight:  # type: ignore[override]
        self.check(plan.chunks)
        self.steps.append(plan.tokens)
        number = len(self.steps)
        self.events.append(("launch", number))
        tokens = {}
        for chunk in plan.chunks:
            known = chunk.sequence.tokens
            if chunk.start >= len(known):
                assert before is not None, "this token is unknown"
                known = before.tokens[chunk.sequence]
            assert chunk.start + chunk.length <= len(known)
            if chunk.samples:
                tokens[chunk.sequence] = [*known, next_id(known)]
        return StepInFlight(self, plan, number, tokens, int(self.ahead(plan)))


class Overlapped(Bench):
    def __init__(self, check: Callable[[list[Chunk]], None] = lambda chunks: None) -> None:
        self.device = Device(check)
        super().__init__(runner=self.device)


def mixture(bench: Bench) -> None:
    """Sends long and short requests, some of them later, with ends that are not known in advance."""
    for i in range(6):
        stop = tuple(expected([i + 1] * (1 + 9 * i), 6)[3:5]) if i % 2 else ()
        sampling = m.Sampling(3 + 4 * i, stop_token_ids=stop)
        bench.send(m.Submit(i, pack_u32([i + 1] * (1 + 9 * i)), sampling))
        bench.iterate(2)


def test_overlap_launches_the_next_step_before_reading_the_last() -> None:
    bench = Overlapped()
    bench.send(submit(1, [1], 4))
    bench.drain()
    assert bench.device.events == [
        ("launch", 1), ("launch", 2), ("read", 1), ("launch", 3), ("read", 2), ("launch", 4), ("read", 3), ("read", 4),
    ]  # fmt: skip
    assert bench.received()[0] == {1: expected([1], 4)}


def test_overlap_changes_no_message() -> None:
    plain, overlapped = Bench(), Overlapped()
    for bench in (plain, overlapped):
        mixture(bench)
        bench.iterate(40)
    outputs, ends = plain.received()
    assert len(ends) == 6 and {end.outcome for end in ends.values()} == {m.Outcome.LENGTH, m.Outcome.STOP}
    assert overlapped.received()[0] == outputs
    assert {id: (end.outcome, end.tokens) for id, end in overlapped.received()[1].items()} == {
        id: (end.outcome, end.tokens) for id, end in ends.items()
    }
    assert sum(overlapped.runner.steps) - sum(plain.runner.steps) <= 3, "one wasted row for each unexpected end"
    for name in ("sampled_tokens", "prefill_tokens"):
        counts = [bench.metrics.registry.get_sample_value(f"sluice_{name}_total") for bench in (plain, overlapped)]
        assert counts[0] == counts[1], name
    assert overlapped.scheduler.status.prefill_tokens == plain.scheduler.status.prefill_tokens


def test_step_that_may_not_overlap_is_read_at_once() -> None:
    bench = Overlapped()
    bench.device.ahead = lambda plan: not any(chunk.sequence.key[1] == 2 for chunk in plan.chunks)
    bench.send(submit(1, [1], 6))
    bench.iterate(2)
    bench.send(submit(2, [2], 2))
    bench.iterate()
    assert bench.device.events[-3:] == [("launch", 3), ("read", 2), ("read", 3)] and not bench.loop.in_flight
    bench.drain()
    assert bench.received()[0] == {1: expected([1], 6), 2: expected([2], 2)}


def test_latencies_are_recorded_when_tokens_are_applied() -> None:
    bench = Overlapped()
    bench.send(submit(1, [1], 4))
    bench.drain()
    assert bench.stats.ttft.quantiles().p50 == 1.0, "read in the turn after the one that launched it"
    assert list(bench.stats.itl._values) == [1.0] * 3


@pytest.mark.parametrize("culprit", range(6))
@pytest.mark.parametrize("late", [False, True])
def test_failing_step_fails_only_the_culprit(culprit: int, late: bool) -> None:
    """The step fails when it is launched, or when it is read while the next step is already in flight."""

    def trouble(chunks: list[Chunk]) -> None:
        if any(one.sequence.key == (ME, culprit) and one.start + one.length == 22 for one in chunks):
            raise RuntimeError("unlucky")

    bench = Overlapped() if late else Overlapped(trouble)
    if late:
        bench.device.trouble = trouble
    bench.send(*(submit(i, [i + 1] * 20) for i in range(3)))
    bench.iterate(2)
    bench.send(*(submit(i, [i + 1] * 20) for i in range(3, 6)))
    bench.drain()
    check_only_one_failed(bench, culprit)


def test_failure_whose_culprit_was_aborted_fails_no_request() -> None:
    def trouble(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, 1) and chunk.start == 1 for chunk in chunks):
            raise RuntimeError("unlucky")

    bench = Overlapped()
    bench.device.trouble = trouble
    bench.send(submit(1, [1], 9), submit(2, [2], 9))
    bench.iterate(2)
    bench.send(m.Abort((1,)))
    bench.iterate()
    assert bench.device.events[-4:] == [("launch", 3), ("read", 2), ("launch", 4), ("read", 4)]
    bench.drain()
    outputs, ends = bench.received()
    assert ends[1].outcome is m.Outcome.ABORTED and ends[2].outcome is m.Outcome.LENGTH
    assert outputs[2] == expected([2], 9)


def test_out_of_memory_shrinks_the_step_and_fails_no_request() -> None:
    def check(chunks: list[Chunk]) -> None:
        if sum(chunk.length for chunk in chunks) > 30:
            raise MemoryError("too large")

    bench = Overlapped(check)
    bench.send(submit(1, [1] * 200), submit(2, [2] * 100), submit(3, [3]))
    bench.drain()
    outputs, ends = bench.received()
    assert outputs == {1: expected([1] * 200, 5), 2: expected([2] * 100, 5), 3: expected([3], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}


def test_request_aborted_while_in_flight_gets_one_end_and_no_more_tokens() -> None:
    bench = Overlapped()
    bench.send(submit(1, [1], 100), submit(2, [2], 100), submit(3, [3], 9), submit(4, [4], 100, deadline_ms=3500))
    bench.send(submit(1, [5], 100), who=YOU)
    bench.iterate(3)
    bench.send(m.Abort((1,)))
    bench.send(FrontendGone(), who=YOU)
    bench.iterate()
    bench.send(m.Abort((2,)))
    bench.drain()
    outputs, ends = bench.received()
    assert {id: end.outcome for id, end in ends.items()} == {
        1: m.Outcome.ABORTED, 2: m.Outcome.ABORTED, 3: m.Outcome.LENGTH, 4: m.Outcome.DEADLINE,
    }  # fmt: skip
    for id in range(1, 5):
        assert outputs[id] == expected([id], ends[id].tokens), "as many as the end says"
    assert bench.scheduler.state.paging.pools[0].counts().owned == 0


def test_resync_sends_no_tokens_of_in_flight_steps() -> None:
    bench = Overlapped()
    bench.send(submit(1, [1], 9))
    bench.iterate(4)
    told = bench.received()[0][1]
    bench.server.sent.clear()
    bench.send(m.Resync(1, 0))
    bench.request_table.receive(bench.server.inbox, bench.now)  # type: ignore[arg-type]
    bench.request_table.publish(bench.server, bench.now)  # type: ignore[arg-type]
    assert bench.received()[0][1] == told and len(told) == 3


def test_crash_journal_records_sequences_of_both_in_flight_steps() -> None:
    bench = Overlapped()
    named: list[set[int]] = []
    running = bench.request_table.crash_journal.record_step

    def note(sequences: list[Sequence]) -> None:
        named.append({sequence.key[1] for sequence in sequences})
        assert len(sequences) == len(set(sequences))
        running(sequences)

    bench.request_table.crash_journal.record_step = note  # type: ignore[method-assign]
    bench.send(submit(1, [1], 2))
    bench.iterate()
    bench.send(submit(2, [2], 3))
    bench.drain()
    assert named[:2] == [{1}, {1, 2}] and named[-1] == {2}


def test_suspect_runs_with_nothing_in_flight() -> None:
    bench = Overlapped()
    alone: list[set[int]] = []
    bench.device.trouble = lambda chunks: alone.append({chunk.sequence.key[1] for chunk in chunks})
    bench.send(submit(1, [1], 8))
    bench.iterate(2)
    bench.send(submit(2, [2], 4, crashes=1))
    bench.drain()
    assert {2} in alone
    assert bench.device.events[bench.device.events.index(("launch", 4)) - 1][0] == "read", "nothing was in flight"
    assert bench.received()[0] == {1: expected([1], 8), 2: expected([2], 4)}


def test_stopped_loop_has_nothing_in_flight() -> None:
    bench = Overlapped()
    bench.send(submit(1, [1], 100))
    turns = iter([False] * 5 + [True])
    bench.loop.run(lambda: next(turns))
    assert not bench.loop.in_flight and bench.received()[0][1] == expected([1], 5)
    bench.loop.run(lambda: not bench.scheduler.has_work)
    assert bench.received()[0][1] == expected([1], 100) and not bench.loop.in_flight
