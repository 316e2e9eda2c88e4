"""The request table through a loop: what frontends are sent, and when requests are rejected or ended."""

import pytest

from shared import messages as m
from shared.codec import pack_u32, unpack_u32
from tests.wire.harness import VOCAB, expected
from tests.worker.engine.harness import YOU, Bench, submit
from worker.engine.requests import KEEP_FINISHED_S
from worker.transport.server import FrontendGone


def test_one_frame_a_frontend_a_step() -> None:
    bench = Bench()
    bench.say(submit(1, [1]), submit(2, [2]))
    bench.say(submit(1, [3]), who=YOU)
    bench.turn(5)
    outputs, ends = bench.heard()
    assert outputs == {1: expected([1], 5), 2: expected([2], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert bench.heard(YOU)[0] == {1: expected([3], 5)}
    assert len(bench.link.sent) == 2 * (1 + 5)  # admissions, then a frame a step


def test_a_request_said_twice_is_admitted_once() -> None:
    bench = Bench()
    bench.say(submit(1, [1]), submit(1, [1]))
    bench.turn(6)
    admitted = [a for _, step in bench.link.sent for a in step.admitted]
    assert len(admitted) == 2 and len({a.seed for a in admitted}) == 1
    assert bench.heard()[0] == {1: expected([1], 5)}


def test_a_resumed_request_goes_on_at_its_offset() -> None:
    bench = Bench()
    whole = expected([1, 2], 8)
    bench.say(submit(1, [1, 2], 8, generated=pack_u32(whole[:3])))
    bench.turn(6)
    starts = [unpack_u32(step.starts)[0] for _, step in bench.link.sent if step.ids]
    assert starts == [3, 4, 5, 6, 7]
    assert [unpack_u32(step.tokens)[0] for _, step in bench.link.sent if step.ids] == whole[3:]


def test_resync_sends_what_is_missing_for_a_while_and_then_the_truth() -> None:
    bench = Bench()
    bench.say(submit(1, [1]))
    bench.turn(6)
    bench.link.sent.clear()
    bench.say(m.Resync(1, 2))
    bench.turn()
    ((_, step),) = bench.link.sent
    assert unpack_u32(step.starts).tolist() == [2] and unpack_u32(step.tokens).tolist() == expected([1], 5)[2:]
    assert step.ends[0].outcome is m.Outcome.LENGTH
    bench.now += KEEP_FINISHED_S + 1
    bench.turn()
    bench.link.sent.clear()
    bench.say(m.Resync(1, 2))
    bench.turn()
    assert bench.link.sent[0][1].unknown == (1,) and not bench.link.sent[0][1].ends


def test_what_a_gone_frontend_owned_is_freed() -> None:
    bench = Bench()
    bench.say(submit(1, [1], 100), submit(2, [2], 100))
    bench.say(submit(1, [3], 100), who=YOU)
    bench.turn(3)
    bench.say(FrontendGone())
    bench.turn()
    assert [sequence.key for sequence in bench.scheduler.sequences()] == [(YOU, 1)]


def test_a_deadline_ends_a_request_with_its_own_outcome() -> None:
    bench = Bench()
    bench.say(submit(1, [1], 100, deadline_ms=3500))
    bench.turn(8)
    outputs, ends = bench.heard()
    assert ends[1].outcome is m.Outcome.DEADLINE and ends[1].tokens == len(outputs[1]) == 4


@pytest.mark.parametrize("idle", [1, 500])
def test_retry_after_is_the_backlog_at_the_measured_speed(idle: int) -> None:
    """Measured while there was work, however little that was lately."""
    bench = Bench()
    bench.turn(1)
    bench.say(submit(100, [1], 1))
    bench.turn(1 + idle)
    bench.say(*(submit(id, [id + 1] * 20, 100) for id in range(8)))
    bench.turn(2)  # all run: each has 98 tokens to go, and two steps have shown the speed
    bench.say(*(submit(id, [id + 1] * 20, 100) for id in range(8, 24)))
    bench.turn()
    refused = [one for _, step in bench.link.sent for one in step.rejected]
    assert len(refused) == 8 and {one.reason for one in refused} == {m.Refusal.QUEUE_FULL}
    backlog, speed = 8 * 98 + 8 * (20 + 100), (2 + 8 * (20 + 2)) / 1.0  # a step of the bench ends when it begins
    assert [one.retry_after_s for one in refused] == pytest.approx([backlog / speed] * 8)


def test_refusals_name_their_reason() -> None:
    bench = Bench()
    bench.say(submit(1, []), submit(2, [VOCAB]), submit(3, [1], 600), submit(4, [1], crashes=2))
    bench.turn()
    bench.request_table.draining = True
    bench.say(submit(5, [1]))
    bench.turn()
    reasons = {r.id: r.reason for _, step in bench.link.sent for r in step.rejected}
    assert reasons == {
        1: m.Refusal.INVALID, 2: m.Refusal.INVALID, 3: m.Refusal.TOO_LONG, 4: m.Refusal.INVALID, 5: m.Refusal.DRAINING,
    }  # fmt: skip


def test_a_frame_with_half_a_number_fails_nobody_else() -> None:
    bench = Bench()
    bench.say(m.Submit(1, b"abc", m.Sampling(5)), submit(2, [2]))
    bench.turn(6)
    assert bench.heard()[0] == {2: expected([2], 5)}


def test_shutdown_ends_everybody_once() -> None:
    bench = Bench()
    bench.say(submit(1, [1], 100), submit(2, [2], 1))
    bench.turn(2)
    bench.request_table.end_all(m.Outcome.SHUTDOWN, bench.now, "bye")
    bench.request_table.publish(bench.link, bench.now)  # type: ignore[arg-type]
    ends = bench.heard()[1]
    assert (ends[1].outcome, ends[2].outcome) == (m.Outcome.SHUTDOWN, m.Outcome.LENGTH)
