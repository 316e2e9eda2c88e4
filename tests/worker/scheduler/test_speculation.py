"""Speculation: drafts use only the tokens that a step has left, and change neither the output nor the order of work."""

from itertools import count
from typing import Any

import pytest

from shared.messages import Outcome
from shared.messages.requests import SamplerChain
from shared.sandbox import SLOW_S
from tests.worker.scheduler.harness import EOS, OracleDrafter, Rig, Rule, chain, commit, next_id, reference, set_drafter
from worker.scheduler.host_budget import HEAVY_S, STEP_S, HostWork
from worker.scheduler.ngrams import INDEXED_PER_STEP, NgramDrafter
from worker.scheduler.sequence import TILE, Chunk, MirostatRecord, Plan, Sequence

FREE = 0.0  # cost of a row at which every draft is worth computing


def test_ngram_drafter_proposes_what_followed_the_same_tokens_last() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 9, 8, 1, 2, 3]
    assert NgramDrafter().propose(tokens, 3, FREE) == (6, 7, 9)


def test_ngram_drafter_prefers_three_equal_tokens_to_one() -> None:
    assert NgramDrafter().propose([1, 2, 3, 7, 5, 3, 8, 1, 2, 3], 1, FREE) == (7,)
    assert NgramDrafter().propose([1, 2, 3, 7, 5, 3, 8, 4, 2, 3], 1, FREE) == (8,)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_ngram_drafter_without_a_match_proposes_nothing(tokens: list[int]) -> None:
    assert NgramDrafter().propose(tokens, 7, FREE) == ()


def test_ngram_drafter_continues_a_cycle() -> None:
    assert NgramDrafter().propose([5, 1, 2, 1, 2, 1, 2], 5, FREE) == (1, 2, 1, 2, 1)


def test_ngram_drafter_indexes_new_tokens() -> None:
    drafter, tokens = NgramDrafter(), [1, 2, 3]
    for _ in range(3):
        assert drafter.propose(tokens, 2, FREE) == ()
        tokens = [*tokens, 10 + len(tokens)]
    assert drafter.propose([*tokens, 1, 2, 3], 2, FREE) == tuple(tokens[3:5])


def test_ngram_drafter_indexes_a_long_prompt_over_several_steps() -> None:
    tokens = [1, 2, 3, *range(100, 100 + 2 * INDEXED_PER_STEP), 7, 8, 9, 5, 1, 2, 3]
    early = NgramDrafter()
    assert early.propose(tokens, 2, FREE) == (100, 101), "its beginning is known at once"
    late, tokens = NgramDrafter(), [*tokens, 7, 8, 9]
    assert [late.propose(tokens, 1, FREE) for _ in range(3)] == [(), (), (5,)]


def test_ngram_drafter_learns_apart_how_often_copies_go_on() -> None:
    copied, drafter, cost = [*range(30), *range(20)], NgramDrafter(), 0.1
    assert len(drafter.propose(copied, 15, cost)) > 1, "eight equal tokens are probably a copy"
    for _ in range(30):
        drafter.record(15, 15)
    assert len(drafter.propose(copied, 15, cost)) == 15
    assert len(drafter.propose([*copied, 90, 0, 1, 2], 15, cost)) == 1, "as before for three tokens"


def test_ngram_drafter_proposes_what_follows_forced_ids() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert NgramDrafter().propose(tokens, 2, FREE, 0, (2, 3, 4)) == (5, 6)
    assert NgramDrafter().propose([*tokens, 1], 2, FREE, 0, (2, 3)) == (4, 5)
    assert NgramDrafter().propose(tokens, 2, FREE, 0, (9, 9)) == ()
    watching, text = NgramDrafter(), [*tokens]
    assert watching.propose(text, 2, 0.9, 0, (2, 3, 4)) == (), "too expensive"
    text += [2, 3, 4, 5]
    before = watching._indexes[0].short.acceptance
    watching.propose(text, 2, 0.9)
    assert watching._indexes[0].short.acceptance > before, "the guess after the forced ids was right"


def test_ngram_drafter_length_follows_the_acceptance() -> None:
    tokens = [*range(20), *range(5)]
    drafter, cost = NgramDrafter(), 0.1
    assert len(drafter.propose(tokens, 7, cost)) == 1, "a fifth, a twenty-fifth"
    for _ in range(10):
        drafter.record(7, 7)
    assert len(drafter.propose(tokens, 7, cost)) == 7
    for _ in range(12):
        drafter.record(7, 0)
    assert len(drafter.propose(tokens, 7, cost)) == 1


def test_ngram_drafter_rejected_drafts_become_rare_and_never_cease() -> None:
    tokens, drafter, rows = [*range(20), *range(5)], NgramDrafter(), [0] * 1000
    for step in range(1000):
        rows[step] = len(drafter.propose(tokens, 7, 1 / 40))
        if rows[step]:
            drafter.record(rows[step], 0)
    assert 5 < sum(rows[500:]) < 100 and max(rows[500:]) == 1


def test_ngram_drafter_watches_proposals_that_do_not_pay_yet() -> None:
    tokens, drafter, cost = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], NgramDrafter(), 0.45
    for token in (4, 5, 6):
        assert drafter.propose(tokens, 4, cost) == ()
        tokens.append(token)
    assert drafter.propose(tokens, 1, cost) == (7,), "three proposals were right"


def test_ngram_drafter_with_full_acceptance_stays_within_its_limit() -> None:
    drafter, tokens = NgramDrafter(), [*range(20), *range(5)]
    drafter.propose(tokens, 7, FREE)
    drafter.record(10_000, 10_000)
    assert len(drafter.propose(tokens, 7, 0.99)) == 7 and drafter.propose(tokens, 7, 1.0) == ()


def test_ngram_drafter_that_was_stopped_proposes_nothing() -> None:
    drafter, tokens = NgramDrafter(), [*range(20), *range(5)]
    assert drafter.propose(tokens, 7, FREE)
    drafter.stop()
    drafter.record(7, 0)
    assert drafter.propose(tokens, 7, FREE) == ()


class PartlyRight(OracleDrafter):
    def __init__(self, tokens: list[int], right: int) -> None:
        super().__init__(tokens)
        self._right = right

    def _guess(self, place: int) -> int:
        if place >= len(self._tokens):
            return 0
        return self._tokens[place] if place < self._right else self._tokens[place] + 1


def speculating(**settings: Any) -> Rig:
    return Rig(**{"pages": 65, "page_size": 32, "max_draft_tokens": 7, **settings})


def submit(rig: Rig, prompt: list[int], max_tokens: int = 24, *, right: int = 99, **options: Any) -> Sequence:
    """Submits a sequence, whose drafts are right for the first `right` output tokens and wrong after them."""
    sequence = rig.submit(prompt, max_tokens, **{"ignore_eos": True, **options})
    drafter = PartlyRight(reference(sequence, rig.config)[0], sequence.prompt_len + right)
    set_drafter(rig.scheduler, sequence, drafter)
    return sequence


def drafts(plan: Plan) -> list[int]:
    return [len(chunk.drafts) for chunk in plan.chunks]


def test_drafts_that_are_right_come_in_one_step_with_one_token_more() -> None:
    one = speculating()
    sequence = submit(one, [1, 2, 3])
    one.step()
    assert sequence.output_len == 1 and drafts(one.plan()) == [7]
    (update,) = one.step()
    assert update.tokens == sequence.tokens[4:] == reference(sequence, one.config)[0][4:12]
    assert sequence.uncomputed_tokens == 1 and (sequence.in_flight_tokens, sequence.pending_outputs) == (0, 0)
    scheduler = one.scheduler
    assert (scheduler.status.draft_tokens, scheduler.status.accepted_tokens) == (7, 7)
    assert (scheduler.status.generation_tokens, scheduler.status.prefill_tokens) == (9, 3)


@pytest.mark.parametrize("right", range(1, 9))
def test_drafts_are_accepted_up_to_the_first_wrong_one(right: int) -> None:
    one = speculating()
    sequence = submit(one, [1, 2, 3], right=right)
    one.step()
    (update,) = one.step()
    assert len(update.tokens) == min(7, right - 1) + 1
    assert sequence.computed_tokens == len(sequence.tokens) - 1
    assert one.scheduler.status.accepted_tokens == len(update.tokens) - 1
    one.finish(50)
    assert one.ends == {sequence: Outcome.LENGTH}, "with the tokens of the reference, in check_updates()"


def test_drafts_with_an_eos_end_the_sequence_there() -> None:
    one = speculating(eos_token_ids=frozenset({EOS}), max_seq_len=64)
    every = [submit(one, [i, 3 * i % 7, 5], 50, ignore_eos=False) for i in range(1, 12)]
    one.finish(300)
    assert set(one.ends) == set(every) and set(one.ends.values()) == {Outcome.EOS}
    assert one.scheduler.status.accepted_tokens > len(every) and one.pool.counts().owned == 0


def test_drafts_with_a_stop_id_end_only_from_min_tokens_on() -> None:
    one = speculating()
    whole = reference(one.sequence([1, 2, 3], 24, ignore_eos=True), one.config)[0][3:]
    stop = next(id for at, id in enumerate(whole) if id in whole[:at] and at > 5)
    sequence = submit(one, [1, 2, 3], 24, stop_token_ids=(stop,), min_tokens=whole.index(stop) + 2)
    one.finish(30)
    assert one.ends == {sequence: Outcome.STOP} and sequence.tokens.count(stop) > 1


@pytest.mark.parametrize(("sequences", "expected"), [(1, [7]), (2, [7, 7]), (8, [1] * 8), (TILE, [0] * TILE)])
def test_drafts_share_the_free_rows_of_a_tile(sequences: int, expected: list[int]) -> None:
    one = speculating()
    for i in range(sequences):
        submit(one, [i + 1, 2, 3])
    one.step()
    plan = one.plan()
    assert drafts(plan) == expected and plan.tokens <= TILE


def test_drafts_beside_a_prompt_are_none() -> None:
    one = speculating()
    submit(one, [1, 2, 3])
    one.step()
    submit(one, [4, 5, 6])
    assert drafts(one.plan()) == [0, 0]
    one.step()
    assert drafts(one.plan()) == [7, 7]


@pytest.mark.parametrize(("settings", "max_tokens", "expected"), [
    ({"page_size": 8}, 24, 4),  # page 1 has three prompt tokens, a sampled token, and slots for four more
    ({"page_size": 1}, 24, 0),
    ({"max_seq_len": 8}, 4, 2),
    ({"max_step_tokens": 3}, 24, 2),
    ({"max_draft_tokens": 2}, 24, 2),
    ({"max_draft_tokens": 0}, 24, 0),
    ({}, 3, 1),
    ({}, 2, 0),
])  # fmt: skip
def test_drafts_stay_within_pages_and_lengths(settings: dict[str, int], max_tokens: int, expected: int) -> None:
    one = speculating(**settings)
    sequence = submit(one, [1, 2, 3], max_tokens)
    one.step()
    pages = len(sequence.pages[0])
    while sequence.uncomputed_tokens > 1 or not sequence.output_len:
        one.step()
    assert drafts(one.plan()) == [expected] and len(sequence.pages[0]) >= pages


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logprobs": 0},
        {"chain": SamplerChain(("top_k",), top_k=5)}, {"logit_bias": ((3, 1.0),)}, {"min_tokens": 5},
    ],
)  # fmt: skip
def test_drafts_with_any_sampling_are_as_many_as_without(options: dict[str, Any]) -> None:
    one = speculating()
    submit(one, [1, 2, 3], **options)
    one.step()
    assert drafts(one.plan()) == [7]


def test_drafts_after_a_suspected_crash_or_with_mirostat_are_none() -> None:
    one = speculating()
    drawn, suspect, _ = (submit(one, [i, 2, 3]) for i in range(3))
    drawn.mirostat, suspect.history.crashes = MirostatRecord([], [10.0]), 1
    one.step()
    assert drafts(one.plan()) == [0, 0, 7]


def bound(rule: Rule, max_tokens: int = 24) -> tuple[Rig, Sequence]:
    """Returns a sequence with this rule, whose drafter guesses right, after its first output token."""
    one = speculating(token_s=0.01)
    sequence = submit(one, [1, 2, 3], max_tokens)
    set_drafter(one.scheduler, sequence, NgramDrafter())
    for _ in range(2):  # the second step measures a decode without drafts
        one.step()
    set_drafter(one.scheduler, sequence, PartlyRight(reference(sequence, one.config)[0], 99))
    sequence.constraint = rule
    return one, sequence


def test_drafts_that_a_constraint_forbids_are_not_computed() -> None:
    coming = speculating()
    sequence = submit(coming, [1, 2, 3])
    guesses = reference(sequence, coming.config)[0][5:]
    one, _ = bound(Rule(forbidden=(guesses[2],)))
    (chunk,) = one.plan().chunks
    first = next(at for at, id in enumerate(guesses) if id == guesses[2])
    assert chunk.drafts == tuple(guesses[:first]) and chunk.forced == (0, 0)
    one, _ = bound(Rule(last=3))
    assert drafts(one.plan()) == [3], "nothing follows the end"


def test_forced_ids_are_drafts_before_and_after_the_guesses() -> None:
    one, sequence = bound(Rule(forced={0: (4, 5), 4: (6, 7)}))
    text = [*reference(sequence, one.config)[0]]
    guesses = PartlyRight(text, 99)
    set_drafter(one.scheduler, sequence, guesses)
    guesses.propose = lambda *asked: tuple(text[6:8])  # type: ignore[method-assign]
    (chunk,) = one.plan().chunks
    assert chunk.drafts == (4, 5, *text[6:8], 6, 7) and chunk.forced == (2, 2)


def test_only_guesses_teach_the_drafter() -> None:
    one, sequence = bound(Rule())
    assert one.scheduler.speculation is not None
    noted: list[tuple[int, int]] = []
    guesses = OracleDrafter([])
    guesses.record = lambda *counts: noted.append(counts)  # type: ignore[method-assign, assignment]
    set_drafter(one.scheduler, sequence, guesses)
    for accepted in (1, 2, 4, 5, 6):
        chunk = Chunk(sequence, 3, 7, True, (1, 2, 3, 4, 5, 6), (2, 1))
        one.scheduler.speculation.record(chunk, accepted)
    assert noted == [(3, 0), (3, 2), (3, 3), (3, 3)], "without those behind a rejected forced id"


def test_forced_ids_are_drafts_although_no_guess_pays() -> None:
    one, sequence = bound(Rule(forced={0: (4, 5)}))
    set_drafter(one.scheduler, sequence, NgramDrafter())
    (chunk,) = one.plan().chunks
    assert chunk.drafts[:2] == (4, 5) and chunk.forced[0] == 2


def test_host_time_of_a_row_is_a_part_of_its_cost() -> None:
    def drafted(row_s: float) -> int:
        one = speculating(token_s=0.01)
        sequence = submit(one, [1, 2, 3], 60)
        sequence.host = HostWork(mask=row_s)
        set_drafter(one.scheduler, sequence, NgramDrafter())
        for _ in range(3):
            one.step()
        sequence.tokens[3:] = [7] * sequence.output_len  # a repetition
        (chunk,) = one.plan().chunks
        return len(chunk.drafts)

    assert drafted(0.0) > 0 and drafted(1e-5) > 0 and drafted(0.09) == 0


def test_drafts_use_only_the_host_time_that_decodes_leave() -> None:
    one = speculating()
    busy, free = (submit(one, [i, 2, 3], 60) for i in range(2))
    busy.host = HostWork(scores=STEP_S / 6)
    one.step()
    assert drafts(one.plan()) == [2, 7], "five sixths are left, half of them for each sequence"
    assert free.host is None


def test_drafts_under_a_grammar_that_takes_long_are_none_beside_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    def drafted(call_s: float, tenants: tuple[str, ...]) -> list[int]:
        """Returns the drafts of a second step. call_s: how long the search for drafts takes under the grammar"""
        monkeypatch.setattr("worker.scheduler.drafts.time.thread_time", count(step=call_s).__next__)
        one = speculating()
        sequences = [submit(one, [i + 1, 2, 3], 60, tenant=tenant) for i, tenant in enumerate(tenants)]
        one.step()
        sequences[0].constraint = Rule()
        one.step()
        return drafts(one.plan())

    assert drafted(HEAVY_S / 4, ("a", "b")) == drafted(2 * HEAVY_S, ("a", "a")) == [7, 7]
    assert drafted(2 * HEAVY_S, ("a",)) == [7]
    assert drafted(2 * HEAVY_S, ("a", "b")) == [0, 7]


def test_drafts_under_grammars_that_take_long_are_none_while_other_tenants_are_between_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.scheduler.drafts.time.thread_time", count(step=2 * HEAVY_S).__next__)

    def drafted(pause_s: float) -> list[int]:
        """Returns the drafts of a step, so long after the last one with a sequence of another tenant."""
        now = 1000.0
        monkeypatch.setattr("worker.scheduler.drafts.time.monotonic", lambda: now)
        one = speculating()
        first = submit(one, [1, 2, 3], 60, tenant="a")
        other = submit(one, [2, 2, 3], 10, tenant="b")
        one.step()
        first.constraint = Rule()
        while other not in one.ends:
            one.step()
        now += pause_s
        return drafts(one.plan())

    assert drafted(SLOW_S / 2) == [0] and drafted(SLOW_S) == [7]


def test_a_step_looks_for_drafts_under_grammars_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.scheduler.drafts.time.thread_time", count(step=0.6 * STEP_S).__next__)
    one = speculating()
    sequences = [submit(one, [i + 1, 2, 3], 60) for i in range(4)]
    one.step()
    for sequence in sequences[:3]:
        sequence.constraint = Rule()
    assert [bool(count) for count in drafts(one.plan())] == [True, True, False, True]


def test_drafts_that_were_rejected_are_never_published() -> None:
    """A page filled by drafts is not published before its tokens are accepted."""
    one = speculating(page_size=4, max_draft_tokens=3)
    first = submit(one, [1, 2, 3], right=1)
    one.step()
    one.step()
    assert first.output_len == 2 and one.pool.counts().cached == 0 and not first.prefix.digests[1:]
    one.finish(60)
    again = submit(one, first.tokens[:20])
    one.finish(60)
    assert again.prefix.cached_tokens >= 16 and again.tokens[20:] == [*_following(again.tokens[:20], 24)]


def _following(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_id(chain(tokens)[-1]))
    return tokens[-count:]


def test_retryable_chunks_have_no_drafts_then_or_later() -> None:
    one = speculating()
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


def test_plan_has_nothing_behind_drafts_in_flight() -> None:
    one = speculating()
    sequence = submit(one, [1, 2, 3], right=3)
    one.step()
    one.launch(one.plan())
    assert not one.plan()
    one.finish_steps()
    assert sequence.output_len == 4 and one.plan()


def test_update_skips_drafts_of_sequences_that_left_or_were_preempted() -> None:
    one = speculating()
    gone, stays, back = (submit(one, [i, 2, 3]) for i in range(3))
    one.step()
    plan = one.plan()
    assert min(drafts(plan)) > 2
    one.launch(plan)
    one.scheduler.abort(gone.key)
    one.scheduler.state.preempt(back, one.now)
    assert [update.sequence for update in one.finish_steps()] == [stays]
    assert (gone.output_len, back.output_len) == (1, 1)
    one.finish(50)
    assert set(one.ends) == {stays, back}


def test_drafts_of_a_complete_resumed_stream_are_none() -> None:
    one = speculating(prefill_chunk_size=4, eos_token_ids=frozenset({EOS}))
    sequence = one.submit([1, 2, 3], 24, generated=(5, EOS))
    set_drafter(one.scheduler, sequence, OracleDrafter([*sequence.tokens, *range(20)]))
    assert drafts(one.plan()) == [0]
    commit(one.scheduler, plan := one.plan(), one.run(plan), one.now)
    last = one.plan()
    assert drafts(last) == [0] and not last.rows and last.tokens == 1
    (end,) = commit(one.scheduler, last, one.run(last), one.now)
    assert (end.tokens, end.outcome) == ([], Outcome.EOS)
