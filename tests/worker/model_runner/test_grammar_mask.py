"""Grammar masks of batches, with matchers that allow fixed tokens. tests/worker/structured_output has real ones."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from shared.messages import Sampling
from worker.model_runner.grammar_mask import GrammarMask
from worker.scheduler.sequence import Row, Sequence
from worker.structured_output.matcher import Matcher, restriction

V, EOS = 20, (3,)


@dataclass
class FakeState:
    allowed: tuple[int, ...]

    def unsafe_compute_mask_ptr(self, address: int, width: int) -> None:
        mask = (ctypes.c_uint8 * width).from_address(address)
        for id in self.allowed:
            mask[id >> 3] |= 1 << (id & 7)


def sequence(*allowed: int, min_tokens: int = 0) -> Sequence:
    state: Any = FakeState(allowed)
    constraint = Matcher(state) if allowed else None
    return Sequence((b"f", 1), [1], 1, Sampling(9, min_tokens=min_tokens), 0, constraint=constraint)


def rows(*sequences: Sequence) -> list[Row]:
    return [(one, one.next_output, ()) for one in sequences]


def possible(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def test_batch_without_grammars_returns_the_same_tensor() -> None:
    logits = torch.zeros(2, V)
    assert GrammarMask(V, EOS).apply(logits, rows(sequence(), sequence()))[0] is logits


def test_only_rows_with_a_grammar_are_masked() -> None:
    logits = torch.arange(2.0 * V).view(2, V)
    masked, _ = GrammarMask(V, EOS).apply(logits, rows(sequence(), sequence(5, 19)))
    assert possible(masked) == [list(range(V)), [5, 19]]
    assert torch.equal(masked[0], logits[0]) and masked[1, 19] == logits[1, 19] and logits.isfinite().all()


def test_every_row_has_its_own_mask() -> None:
    masked, _ = GrammarMask(V, EOS).apply(torch.zeros(2, V), rows(sequence(0), sequence(7, 8)))
    assert possible(masked) == [[0], [7, 8]]


def test_min_tokens_forbids_the_end_unless_nothing_else_is_allowed() -> None:
    masked, _ = GrammarMask(V, EOS).apply(
        torch.zeros(2, V), rows(sequence(3, 4, min_tokens=2), sequence(3, min_tokens=2))
    )
    assert possible(masked) == [[4], [3]]


def test_token_rules_mask_with_a_grammar_and_without() -> None:
    sampling, state = Sampling(9, allowed_token_ids=(2, 3, 19), min_tokens=2), FakeState((3, 19))
    fake: Any = Matcher(state)  # type: ignore[arg-type]
    ruled = [Sequence((b"f", 1), [1], 1, sampling, 0, constraint=restriction(sampling, one)) for one in (None, fake)]
    masked, _ = GrammarMask(V, EOS).apply(torch.zeros(3, V), rows(*ruled, sequence()))
    assert possible(masked) == [[2, 19], [19], list(range(V))]


class CopiedState:
    """Allows the ids of `steps` in turn, and notes how many copies of it have accepted an id."""

    def __init__(self, steps: tuple[tuple[int, ...], ...], at: int = 0) -> None:
        self.steps, self.at = steps, at

    def unsafe_compute_mask_ptr(self, address: int, width: int) -> None:
        FakeState(self.steps[self.at]).unsafe_compute_mask_ptr(address, width)

    def deep_copy(self) -> "CopiedState":
        return CopiedState(self.steps, self.at)

    def consume_token(self, id: int) -> bool:
        self.at += 1
        return id in self.steps[self.at - 1]

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return self.at >= len(self.steps)


def drafted(drafts: tuple[int, ...], *steps: tuple[int, ...], **options: Any) -> tuple[list[list[int]], list[int], int]:
    """Returns the possible ids of the rows of a sequence with these drafts, and the rows that get no id.

    Also returns how many ids the constraint itself has accepted.
    """
    state: Any = CopiedState(steps)
    sampling = Sampling(9, **options)
    one = Sequence((b"f", 1), [1], 1, sampling, 0, constraint=restriction(sampling, Matcher(state)))
    asked: list[Row] = [(one, at, drafts[:at]) for at in range(len(drafts) + 1)]
    masked, unusable = GrammarMask(V, EOS).apply(torch.zeros(len(asked), V), [*asked, *rows(sequence())][: len(asked)])
    return possible(masked), unusable, state.at


def test_rows_after_drafts_are_masked_as_if_the_drafts_were_accepted() -> None:
    assert drafted((5, 6), (5, 7), (6, 8), (9,), (1,)) == ([[5, 7], [6, 8], [9]], [], 0)


def test_rows_behind_a_forbidden_draft_or_without_an_allowed_token_get_no_id() -> None:
    everything = list(range(V))
    assert drafted((5, 4, 9), (5, 7), (6, 8), (9,), (1,)) == ([[5, 7], [6, 8], everything, everything], [2, 3], 0)
    assert drafted((5, 6, 9), (5,), (6,), (), (1,)) == ([[5], [6], [], everything], [2, 3], 0)
    assert drafted((5, 6, 9), (5,), (6,)) == ([[5], [6], everything, everything], [2, 3], 0), "the grammar is complete"
    assert drafted((5,), (), (6,)) == ([[], everything], [1], 0), "the first row's mask is that of the constraint"


def test_token_rules_and_min_tokens_hold_for_rows_after_drafts() -> None:
    found = drafted((5, 6), (5, 7), (6, 7), (3, 7, 8), (1,), bad_words=((5, 7), (6, 8)), min_tokens=3)
    assert found == ([[5, 7], [6], [7]], [], 0)
