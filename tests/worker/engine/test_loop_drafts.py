"""The loop with drafts sends the same messages as without drafts, and a failing drafter fails no request."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.wire.harness import VOCAB, Done, expected, next_id
from tests.worker.engine.harness import ME, Bench, FakeRunner, submit
from worker.model_runner.step import StepOutput
from worker.scheduler.ngrams import NgramDrafter
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.sequence import Chunk, Ids, Plan


@dataclass
class DraftRunner(FakeRunner):
    def launch(self, plan: Plan, before: Done | None) -> Done:
        self.check(plan.chunks)
        self.steps.append(plan.tokens)
        ids = []
        for chunk in plan.sampling:
            tokens = list(chunk.sequence.tokens)
            for draft in (*chunk.drafts, None):
                ids.append(next_id(tokens))
                tokens.append(-1 if draft is None else draft)
        return Done(plan, StepOutput(ids))


class Foresight(NgramDrafter):
    """Proposes the right tokens, but every fifth token is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        coming = expected(tokens, limit)
        return () if self.silent else tuple(id if id % 5 else (id + 1) % VOCAB for id in coming)

    def stop(self) -> None:
        self.silent = True


class Drafting(Bench):
    def __init__(self, check: Callable[[list[Chunk]], None] = lambda chunks: None) -> None:
        config = SchedulerConfig(max_seq_len=512, max_waiting_requests=8, max_draft_tokens=7)
        super().__init__(runner=DraftRunner(check), config=config)

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            super().iterate()
            assert self.scheduler.speculation is not None
            drafters = self.scheduler.speculation.drafters
            for sequence in self.scheduler.sequences():
                if not isinstance(drafters.get(sequence), Foresight):
                    drafters[sequence] = Foresight()


def mixture(bench: Bench) -> None:
    """Sends long and short requests, some of them later, with ends that are not known in advance."""
    for i in range(6):
        stop = tuple(expected([i + 1] * (1 + 9 * i), 26)[13:15]) if i % 2 else ()
        bench.send(m.Submit(i, pack_u32([i + 1] * (1 + 9 * i)), m.Sampling(13 + 4 * i, stop_token_ids=stop)))
        bench.iterate(2)


def test_drafts_change_no_message() -> None:
    plain, drafting = Bench(), Drafting()
    for bench in (plain, drafting):
        mixture(bench)
        bench.iterate(60)
    outputs, ends = plain.received()
    assert len(ends) == 6 and {end.outcome for end in ends.values()} == {m.Outcome.LENGTH, m.Outcome.STOP}
    assert drafting.received()[0] == outputs
    assert {id: (end.outcome, end.tokens) for id, end in drafting.received()[1].items()} == {
        id: (end.outcome, end.tokens) for id, end in ends.items()
    }
    assert len(drafting.runner.steps) < 0.7 * len(plain.runner.steps)
    for name in ("sampled_tokens", "prefill_tokens"):
        counts = [bench.metrics.registry.get_sample_value(f"sluice_{name}_total") for bench in (plain, drafting)]
        assert counts[0] == counts[1], name
    assert drafting.scheduler.status.generation_tokens == plain.scheduler.status.generation_tokens
    assert drafting.scheduler.status.prefill_tokens == plain.scheduler.status.prefill_tokens
    assert 0 < drafting.scheduler.status.accepted_tokens < drafting.scheduler.status.draft_tokens


def test_drafted_tokens_of_a_step_are_one_run_with_one_latency() -> None:
    bench = Drafting()
    bench.send(submit(1, [1], 30))
    bench.iterate(30)
    counts = [unpack_u32(step.counts).tolist() for _, step in bench.server.sent if step.ids]
    assert sum(map(sum, counts)) == 30 and max(map(max, counts)) > 2
    gaps = list(bench.stats.itl._values)
    assert len(gaps) == len(counts) - 1 and gaps == [1.0 / count for (count,) in counts[1:]]


@pytest.mark.parametrize("others", [0, 3])
def test_step_that_fails_with_drafts_is_retried_without(others: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.drafts and chunk.sequence.key == (ME, 9) for chunk in chunks):
            raise MemoryError("more than the device can")

    bench = Drafting(check)
    bench.send(submit(9, [9], 20), *(submit(i, [i + 1], 20) for i in range(others)))
    bench.iterate(40)
    outputs, ends = bench.received()
    assert outputs == {9: expected([9], 20), **{i: expected([i + 1], 20) for i in range(others)}}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}


def test_failing_drafts_are_not_tried_at_every_step() -> None:
    failed = []

    def check(chunks: list[Chunk]) -> None:
        if any(chunk.drafts for chunk in chunks):
            failed.append(chunks)
            raise RuntimeError("unlucky")

    bench = Drafting(check)
    bench.send(submit(1, [1], 20))
    bench.iterate(40)
    assert bench.received()[0] == {1: expected([1], 20)} and len(failed) == 1


@pytest.mark.parametrize("culprit", range(4))
def test_failing_step_with_drafts_fails_only_the_culprit(culprit: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, culprit) and chunk.start + chunk.length >= 25 for chunk in chunks):
            raise RuntimeError("unlucky")

    bench = Drafting(check)
    bench.send(*(submit(i, [i + 1] * 12, 20) for i in range(4)))
    bench.iterate(40)
    outputs, ends = bench.received()
    for i in range(4):
        wanted = expected([i + 1] * 12, 20)
        assert outputs[i] == (wanted[:13] if i == culprit else wanted)
        assert ends[i].outcome is (m.Outcome.ERROR if i == culprit else m.Outcome.LENGTH)
    assert bench.scheduler.state.paging.pools[0].counts().owned == 0


def test_aborted_request_with_drafts_gets_one_end() -> None:
    bench = Drafting()
    bench.send(submit(1, [1], 100), submit(2, [2], 100, deadline_ms=9500), submit(3, [3], 40))
    bench.iterate(6)
    bench.send(m.Abort((1,)))
    bench.iterate(40)
    outputs, ends = bench.received()
    assert [ends[id].outcome for id in (1, 2, 3)] == [m.Outcome.ABORTED, m.Outcome.DEADLINE, m.Outcome.LENGTH]
    for id in range(1, 4):
        assert outputs[id] == expected([id], ends[id].tokens), "as many as the end says"
