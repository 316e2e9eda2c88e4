"""The request table in a loop: what the worker sends to frontends, and when requests are rejected or ended."""

import pytest

from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.wire.harness import VOCAB, expected
from tests.worker.engine.harness import YOU, Bench, submit
from worker.engine.requests import KEEP_FINISHED_S
from worker.engine.transport import FrontendGone


def test_requests_of_one_step_are_sent_in_one_message_per_frontend() -> None:
    bench = Bench()
    bench.send(submit(1, [1]), submit(2, [2]))
    bench.send(submit(1, [3]), who=YOU)
    bench.iterate(5)
    outputs, ends = bench.received()
    assert outputs == {1: expected([1], 5), 2: expected([2], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert bench.received(YOU)[0] == {1: expected([3], 5)}
    assert len(bench.server.sent) == 2 * (1 + 5)  # admissions, then one frame per step


def test_messages_that_take_long_share_iterations_with_steps() -> None:
    now = iter(range(1000))  # each look at the clock takes a second
    bench = Bench(clock=lambda: float(next(now)))
    bench.send(submit(1, [1]), submit(2, [2]), submit(3, [3]))
    bench.iterate()
    assert len(bench.server.inbox) == 2, "one message is always handled"
    bench.iterate(8)
    assert bench.received()[0] == {id: expected([id], 5) for id in (1, 2, 3)}


def test_submit_sent_twice_runs_once() -> None:
    bench = Bench()
    bench.send(submit(1, [1]), submit(1, [1]))
    bench.iterate(6)
    admitted = [a for _, step in bench.server.sent for a in step.admitted]
    assert len(admitted) == 2 and len({a.seed for a in admitted}) == 1
    assert bench.received()[0] == {1: expected([1], 5)}


def test_seeds_that_are_drawn_are_exact_as_floats() -> None:
    """JavaScript and jq read all numbers in JSON as floats, and their users must be able to send a seed back."""
    bench = Bench()
    bench.send(*(submit(id, [id], 1) for id in range(1, 9)))
    bench.iterate(6)
    seeds = {a.seed for _, step in bench.server.sent for a in step.admitted}
    assert len(seeds) == 8 and all(int(float(seed)) == seed for seed in seeds)


def test_submit_with_generated_tokens_continues_at_their_offset() -> None:
    bench = Bench()
    whole = expected([1, 2], 8)
    bench.send(submit(1, [1, 2], 8, generated=pack_u32(whole[:3])))
    bench.iterate(6)
    starts = [unpack_u32(step.starts)[0] for _, step in bench.server.sent if step.ids]
    assert starts == [3, 4, 5, 6, 7]
    assert [unpack_u32(step.tokens)[0] for _, step in bench.server.sent if step.ids] == whole[3:]


def test_resync_sends_missing_output_until_the_record_is_forgotten() -> None:
    bench = Bench()
    bench.send(submit(1, [1]))
    bench.iterate(6)
    bench.server.sent.clear()
    bench.send(m.Resync(1, 2))
    bench.iterate()
    ((_, step),) = bench.server.sent
    assert unpack_u32(step.starts).tolist() == [2] and unpack_u32(step.tokens).tolist() == expected([1], 5)[2:]
    assert step.ends[0].outcome is m.Outcome.LENGTH
    bench.now += KEEP_FINISHED_S + 1
    bench.iterate()
    bench.server.sent.clear()
    bench.send(m.Resync(1, 2))
    bench.iterate()
    assert bench.server.sent[0][1].unknown == (1,) and not bench.server.sent[0][1].ends


def test_frontend_gone_aborts_its_requests() -> None:
    bench = Bench()
    bench.send(submit(1, [1], 100), submit(2, [2], 100))
    bench.send(submit(1, [3], 100), who=YOU)
    bench.iterate(3)
    bench.send(FrontendGone())
    bench.iterate()
    assert [sequence.key for sequence in bench.scheduler.sequences()] == [(YOU, 1)]


def test_deadline_ends_the_request_with_its_own_outcome() -> None:
    bench = Bench()
    bench.send(submit(1, [1], 100, deadline_ms=3500))
    bench.iterate(8)
    outputs, ends = bench.received()
    assert ends[1].outcome is m.Outcome.DEADLINE and ends[1].tokens == len(outputs[1]) == 4


@pytest.mark.parametrize("idle", [1, 500])
def test_retry_after_is_the_backlog_at_the_measured_speed(idle: int) -> None:
    """The speed is measured only while there is work, so idle time does not count."""
    bench = Bench()
    bench.iterate(1)
    bench.send(submit(100, [1], 1))
    bench.iterate(1 + idle)
    bench.send(*(submit(id, [id + 1] * 20, 100) for id in range(8)))
    bench.iterate(2)  # all run: each has 98 tokens left, and two steps have been measured
    bench.send(*(submit(id, [id + 1] * 20, 100) for id in range(8, 24)))
    bench.iterate()
    refused = [one for _, step in bench.server.sent for one in step.rejected]
    assert len(refused) == 8 and {one.reason for one in refused} == {m.Refusal.QUEUE_FULL}
    backlog, speed = 8 * 98 + 8 * (20 + 100), (2 + 8 * (20 + 2)) / 1.0  # steps of the bench take no time
    assert [one.retry_after_s for one in refused] == pytest.approx([backlog / speed] * 8)


def test_rejected_requests_name_their_reason() -> None:
    bench = Bench()
    bench.send(submit(1, []), submit(2, [VOCAB]), submit(3, [1], 600), submit(4, [1], crashes=2))
    bench.iterate()
    bench.request_table.draining = True
    bench.send(submit(5, [1]))
    bench.iterate()
    reasons = {r.id: r.reason for _, step in bench.server.sent for r in step.rejected}
    assert reasons == {
        1: m.Refusal.INVALID, 2: m.Refusal.INVALID, 3: m.Refusal.TOO_LONG, 4: m.Refusal.INVALID, 5: m.Refusal.DRAINING,
    }  # fmt: skip


def test_submit_with_half_a_number_fails_no_other_request() -> None:
    bench = Bench()
    bench.send(m.Submit(1, b"abc", m.Sampling(5)), submit(2, [2]))
    bench.iterate(6)
    assert bench.received()[0] == {2: expected([2], 5)}


def test_shutdown_ends_each_request_once() -> None:
    bench = Bench()
    bench.send(submit(1, [1], 100), submit(2, [2], 1))
    bench.iterate(2)
    bench.request_table.end_all(m.Outcome.SHUTDOWN, bench.now, "bye")
    bench.request_table.publish(bench.server, bench.now)  # type: ignore[arg-type]
    ends = bench.received()[1]
    assert (ends[1].outcome, ends[2].outcome) == (m.Outcome.SHUTDOWN, m.Outcome.LENGTH)
