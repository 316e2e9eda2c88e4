"""Drafts take what a step has left over, and whatever they are, the same tokens come in the same order."""

from typing import Any

import pytest

from shared.messages import Outcome
from tests.worker.schedule.harness import EOS, Prophet, Rig, chain, commit, next_id, reference
from worker.schedule.sequence import Constraint, Plan, Sequence
from worker.schedule.speculation import TILE


def rig(**settings: Any) -> Rig:
    return Rig(**{"pages": 65, "page_size": 32, "max_draft_tokens": 7, **settings})


def submit(rig: Rig, prompt: list[int], max_tokens: int = 24, *, right: int = 99, **options: Any) -> Sequence:
    """Of its drafts the first `right` output tokens are true ones, and no others."""
    sequence = rig.submit(prompt, max_tokens, **{"ignore_eos": True, **options})
    sequence.drafter = Told(reference(sequence, rig.config)[0], sequence.prompt_len + right)
    return sequence


class Told(Prophet):
    def __init__(self, tokens: list[int], right: int) -> None:
        super().__init__(tokens)
        self._right = right

    def _guess(self, place: int) -> int:
        if place >= len(self._tokens):
            return 0
        return self._tokens[place] if place < self._right else self._tokens[place] + 1


def drafts(plan: Plan) -> list[int]:
    return [len(chunk.drafts) for chunk in plan.chunks]


def test_true_drafts_come_in_one_step_and_one_token_more() -> None:
    one = rig()
    sequence = submit(one, [1, 2, 3])
    one.step()
    assert sequence.output_len == 1 and drafts(one.plan()) == [7]
    (advance,) = one.step()
    assert advance.tokens == sequence.tokens[4:] == reference(sequence, one.config)[0][4:12]
    assert sequence.uncomputed_tokens == 1 and (sequence.in_flight_tokens, sequence.pending_outputs) == (0, 0)
    scheduler = one.scheduler
    assert (scheduler.status.draft_tokens, scheduler.status.accepted_tokens) == (7, 7)
    assert (scheduler.status.generation_tokens, scheduler.status.prefill_tokens) == (9, 3)


@pytest.mark.parametrize("right", range(1, 9))
def test_the_longest_true_beginning_is_kept_and_the_token_after_it(right: int) -> None:
    one = rig()
    sequence = submit(one, [1, 2, 3], right=right)
    one.step()
    (advance,) = one.step()
    assert len(advance.tokens) == min(7, right - 1) + 1
    assert sequence.computed_tokens == len(sequence.tokens) - 1
    assert one.scheduler.status.accepted_tokens == len(advance.tokens) - 1
    one.finish(50)
    assert one.ends == {sequence: Outcome.LENGTH}, "with the tokens of the reference, in told()"


def test_an_end_among_them_ends_it_there() -> None:
    one = rig(eos_token_ids=frozenset({EOS}), max_seq_len=64)
    every = [submit(one, [i, 3 * i % 7, 5], 50, ignore_eos=False) for i in range(1, 12)]
    one.finish(300)
    assert set(one.ends) == set(every) and set(one.ends.values()) == {Outcome.EOS}
    assert one.scheduler.status.accepted_tokens > len(every) and one.pool.counts().owned == 0


def test_a_stop_id_counts_from_min_tokens_on() -> None:
    one = rig()
    whole = reference(one.sequence([1, 2, 3], 24, ignore_eos=True), one.config)[0][3:]
    stop = next(id for at, id in enumerate(whole) if id in whole[:at] and at > 5)
    sequence = submit(one, [1, 2, 3], 24, stop_token_ids=(stop,), min_tokens=whole.index(stop) + 2)
    one.finish(30)
    assert one.ends == {sequence: Outcome.STOP} and sequence.tokens.count(stop) > 1


@pytest.mark.parametrize(("sequences", "expected"), [(1, [7]), (2, [7, 7]), (8, [1] * 8), (TILE, [0] * TILE)])
def test_they_share_the_rows_that_are_left_of_a_tile(sequences: int, expected: list[int]) -> None:
    one = rig()
    for i in range(sequences):
        submit(one, [i + 1, 2, 3])
    one.step()
    plan = one.plan()
    assert drafts(plan) == expected and plan.tokens <= TILE


def test_a_step_with_a_prompt_has_none() -> None:
    one = rig()
    submit(one, [1, 2, 3])
    one.step()
    submit(one, [4, 5, 6])
    assert drafts(one.plan()) == [0, 0]
    one.step()
    assert drafts(one.plan()) == [7, 7]


@pytest.mark.parametrize(("settings", "max_tokens", "expected"), [
    ({"page_size": 8}, 24, 4),  # three of the prompt, one sampled, and slots for four more
    ({"page_size": 1}, 24, 0),
    ({"max_seq_len": 8}, 4, 2),
    ({"max_step_tokens": 3}, 24, 2),
    ({"max_draft_tokens": 2}, 24, 2),
    ({"max_draft_tokens": 0}, 24, 0),
    ({}, 3, 1),
    ({}, 2, 0),
])  # fmt: skip
def test_they_stay_within_what_the_sequence_has(settings: dict[str, int], max_tokens: int, expected: int) -> None:
    one = rig(**settings)
    sequence = submit(one, [1, 2, 3], max_tokens)
    one.step()
    pages = len(sequence.pages)
    while sequence.uncomputed_tokens > 1 or not sequence.output_len:
        one.step()
    assert drafts(one.plan()) == [expected] and len(sequence.pages) >= pages


class Anything(Constraint):
    ended, error = False, ""

    def accept(self, token: int) -> bool:
        return True


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logprobs": 0}]
)
def test_who_needs_to_know_the_tokens_before_has_none(options: dict[str, Any]) -> None:
    one = rig()
    submit(one, [1, 2, 3], **options)
    one.step()
    assert drafts(one.plan()) == [0]


def test_who_keeps_to_a_grammar_or_is_suspected_has_none() -> None:
    one = rig()
    bound, suspect, _ = (submit(one, [i, 2, 3]) for i in range(3))
    bound.constraint, suspect.crashes = Anything(), 1
    one.step()
    assert drafts(one.plan()) == [0, 0, 7]


def test_what_a_refused_draft_wrote_is_found_by_nobody() -> None:
    """Pages of four: a page that drafts filled is not published before its tokens are known."""
    one = rig(page_size=4, max_draft_tokens=3)
    first = submit(one, [1, 2, 3], right=1)
    one.step()
    one.step()
    assert first.output_len == 2 and one.pool.counts().cached == 0 and not first.digests[1:]
    one.finish(60)
    again = submit(one, first.tokens[:20])
    one.finish(60)
    assert again.cached_tokens >= 16 and again.tokens[20:] == [*_following(again.tokens[:20], 24)]


def _following(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_id(chain(tokens)[-1]))
    return tokens[-count:]


def test_what_is_tried_again_has_no_drafts_then_or_later() -> None:
    one = rig()
    sequence = submit(one, [1, 2, 3])
    one.step()
    plan = one.plan()
    one.scheduler.launched(plan)
    one.scheduler.discard_in_flight()
    (chunk,) = one.scheduler.retryable(plan.chunks)
    assert (chunk.start, chunk.length, chunk.drafts, chunk.rows) == (3, 1, (), 1)
    rest = Plan([chunk])
    one.commit(rest, one.run(rest))
    assert sequence.output_len == 2 and drafts(one.plan()) == [0]


def test_nothing_is_planned_behind_drafts_under_way() -> None:
    one = rig()
    sequence = submit(one, [1, 2, 3], right=3)
    one.step()
    one.launch(one.plan())
    assert not one.plan()
    one.land()
    assert sequence.output_len == 4 and one.plan()


def test_who_left_or_was_preempted_meanwhile_is_passed_over() -> None:
    one = rig()
    gone, stays, back = (submit(one, [i, 2, 3]) for i in range(3))
    one.step()
    plan = one.plan()
    assert min(drafts(plan)) > 2
    one.launch(plan)
    one.scheduler.abort(gone.key)
    one.scheduler.state.preempt(back, one.now)
    assert [advance.sequence for advance in one.land()] == [stays]
    assert (gone.output_len, back.output_len) == (1, 1)
    one.finish(50)
    assert set(one.ends) == {stays, back}


def test_a_stream_that_goes_on_with_nothing_left_to_sample_has_none() -> None:
    one = rig(prefill_chunk_size=4, eos_token_ids=frozenset({EOS}))
    sequence = one.submit([1, 2, 3], 24, generated=(5, EOS))
    sequence.drafter = Prophet([*sequence.tokens, *range(20)])
    assert drafts(one.plan()) == [0]
    commit(one.scheduler, plan := one.plan(), one.run(plan), one.now)
    last = one.plan()
    assert drafts(last) == [0] and not last.rows and last.tokens == 1
    (end,) = commit(one.scheduler, last, one.run(last), one.now)
    assert (end.tokens, end.outcome) == ([], Outcome.EOS)
