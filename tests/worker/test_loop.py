"""The compute loop and the desk without sockets: what is said to whom, and what a failing step does."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared import messages as m
from shared.codec import pack_u32, unpack_u32
from tests.wire.harness import VOCAB, Done, expected, next_id
from worker.engine.loop import Loop
from worker.engine.requests import KEEP_FINISHED_S, RequestTable
from worker.kv_cache.pages import PagePool
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.run.in_flight import StepOutput
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Chunk, Plan
from worker.transport.server import FrontendGone

ME, YOU = b"frontend", b"otherone"


@dataclass
class FakeServer:
    inbox: deque[tuple[bytes, m.Request | FrontendGone]] = field(default_factory=deque)
    sent: list[tuple[bytes, m.Step]] = field(default_factory=list)

    def publish(self, topic: bytes, step: m.Step) -> None:
        self.sent.append((topic, step))

    def progress(self) -> None: ...
    def flush(self) -> None: ...
    def refresh(self) -> None: ...


@dataclass
class FakeRunner:
    """`check(chunks)` may raise, as a device would, for the whole step."""

    check: Callable[[list[Chunk]], None] = lambda chunks: None
    steps: list[int] = field(default_factory=list)  # tokens of those that went well

    def check_device(self) -> None: ...

    def launch(self, plan: Plan, before: Done | None) -> Done:
        self.check(plan.chunks)
        self.steps.append(plan.tokens)
        return Done(plan, StepOutput([next_id(chunk.sequence.tokens) for chunk in plan.sampling]))


class Bench:
    """A loop with everything around it, turned by hand; `now` moves a second a turn."""

    def __init__(self, check: Callable[[list[Chunk]], None] = lambda chunks: None) -> None:
        self.now = 0.0
        self.runner = FakeRunner(check)
        self.scheduler = Scheduler(SchedulerConfig(max_seq_len=512, max_waiting_requests=8), PagePool(129, 16))
        self.stats, self.metrics, self.link = Stats(), Metrics(), FakeServer()
        self.request_table = RequestTable(
            self.scheduler, self.stats, self.metrics, vocab_size=VOCAB, seeds=random.Random(0)
        )
        self.loop = Loop(
            self.scheduler,
            self.runner,
            self.request_table,
            self.link,
            self.stats,
            self.metrics,
            lambda: self.now,  # type: ignore[arg-type]
        )

    def say(self, *messages: m.Request | FrontendGone, who: bytes = ME) -> None:
        self.link.inbox.extend((who, message) for message in messages)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            self.loop.iterate()
        self.scheduler.check()

    def heard(self, who: bytes = ME) -> tuple[dict[int, list[int]], dict[int, m.End]]:
        """Output ids and ends, by request id; offsets must fit."""
        outputs: dict[int, list[int]] = {}
        ends: dict[int, m.End] = {}
        for topic, step in self.link.sent:
            if topic != who:
                continue
            tokens = iter(unpack_u32(step.tokens))
            for id, start, count in zip(
                unpack_u32(step.ids), unpack_u32(step.starts), unpack_u32(step.counts), strict=True
            ):
                output = outputs.setdefault(id, [])
                assert start == len(output)
                output += [next(tokens) for _ in range(count)]
            for end in step.ends:
                assert end.id not in ends, "an end was said twice"
                ends[end.id] = end
        return outputs, ends


def submit(id: int, prompt: list[int], max_tokens: int = 5, **options: object) -> m.Submit:
    return m.Submit(id, pack_u32(prompt), m.Sampling(max_tokens), **options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("culprit", range(6))
def test_only_the_culprit_fails(culprit: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, culprit) and chunk.sequence.output_len == 2 for chunk in chunks):
            raise RuntimeError("unlucky")

    bench = Bench(check)
    bench.say(*(submit(i, [i + 1] * 20) for i in range(3)))
    bench.turn(2)
    bench.say(*(submit(i, [i + 1] * 20) for i in range(3, 6)))
    bench.turn(8)
    outputs, ends = bench.heard()
    for i in range(6):
        wanted = expected([i + 1] * 20, 5)
        assert outputs[i] == (wanted[:2] if i == culprit else wanted)
        assert ends[i].outcome is (m.Outcome.ERROR if i == culprit else m.Outcome.LENGTH)
    assert "unlucky" in ends[culprit].error
    assert bench.scheduler.state.paging.pool.counts().owned == 0


def test_out_of_memory_shrinks_the_step_and_fails_nobody() -> None:
    def check(chunks: list[Chunk]) -> None:
        if sum(chunk.length for chunk in chunks) > 30:
            raise MemoryError("too large")

    bench = Bench(check)
    bench.say(submit(1, [1] * 200), submit(2, [2] * 100), submit(3, [3]))
    bench.turn(40)
    outputs, ends = bench.heard()
    assert outputs == {1: expected([1] * 200, 5), 2: expected([2] * 100, 5), 3: expected([3], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert max(bench.runner.steps) <= 30


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


def test_tokens_are_counted_as_the_prompts_or_the_answers() -> None:
    bench = Bench()
    bench.say(submit(1, [1] * 9, 5), submit(2, [2] * 40, 3))
    bench.turn(6)
    value = bench.metrics.registry.get_sample_value
    assert [value(f"sluice_{name}_tokens_total") for name in ("prefill", "sampled")] == [49, 8]


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
