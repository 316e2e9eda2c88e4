"""MTP and EAGLE-3 heads propose the drafts of plain PyTorch, and change no token of an answer."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch

from shared.messages import Sampling
from tests.checkpoints import Checkpoints
from tests.worker.model_runner.harness import MAX_SEQ_LEN
from tests.worker.spec_decode.eagle_heads import EAGLES, Eagle
from tests.worker.spec_decode.harness import only_replays, sequences, served
from tests.worker.spec_decode.heads import HEADS, with_head
from tests.worker.spec_decode.made import Made, check_proposals
from worker.model_runner.hidden_states import CONTEXT
from worker.models.decoder import Decoder
from worker.quantization.methods import AS_STORED
from worker.scheduler.sequence import Sequence
from worker.spec_decode.eagle import load_eagle, read_eagle_config
from worker.spec_decode.head_drafter import Head, HeadDrafter, HeadSequence
from worker.spec_decode.mtp import load_head

# EAGLE heads that read several layers, with norms before `fc` or with features that are not normed; an MTP head
GRAPH_KINDS = [(kind, True) for kind in ("qwen3_5-moe", *EAGLES)]


@pytest.fixture(scope="module")
def made(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Makes each checkpoint with a head once."""

    @cache
    def make(kind: str) -> Made:
        folder = tmp_path_factory.mktemp("heads") / kind
        if kind in HEADS:
            head = with_head(kind, checkpoints(kind), folder)
            return Made(folder, lambda of: load_head(folder, of.spec, of.weights, AS_STORED, MAX_SEQ_LEN), head.propose)
        eagle = Eagle(EAGLES[kind], served := checkpoints(EAGLES[kind].served))
        eagle.save(folder)

        def load(of: Decoder) -> Head:
            config = read_eagle_config(folder, of.spec)
            return load_eagle(folder, config, of.spec, of.weights, AS_STORED, MAX_SEQ_LEN)

        return Made(served, load, eagle.propose)

    return make


@pytest.mark.parametrize(("kind", "ahead"), [*((kind, False) for kind in (*HEADS, *EAGLES)), *GRAPH_KINDS])
def test_drafts_are_those_of_plain_pytorch(
    kind: str, ahead: bool, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_proposals(made(kind), monkeypatch, ahead=ahead)


class Corrected:
    """A proposer that calls a drafter, but returns the right tokens up to a random position, and wrong ones after it.

    It compares the drafter's proposals with those of a new drafter, which reads all hidden states at once.
    """

    seconds = 0.0

    def __init__(self, made: Made, drafter: HeadDrafter, right: list[list[int]]) -> None:
        self.drafter, self.compared = drafter, 0
        self._made, self._right, self._draw = made, right, random.Random(2)

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        proposed, returned = self.drafter.propose(wanted), []
        for (sequence, count), drafts in zip(wanted, proposed, strict=True):
            if drafts and self.compared < 20:
                self._compare(sequence, drafts)
            tokens = self._right[sequence.key[1]][len(sequence.tokens) :][:count]
            wrong = self._draw.randint(0, 2 * count)
            returned.append(tuple(0 if at == wrong else token for at, token in enumerate(tokens)))
        return returned

    def _compare(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        fresh, first = self._made.drafter(), self.drafter.sequences.of(sequence).first
        states = self._made.hidden_states(fresh, sequence.tokens[:-1])
        fresh.sequences.read(sequence, first, states[first:])
        assert fresh.propose([(sequence, len(drafts))]) == [drafts]
        self.compared += 1

    def forget(self, target: Sequence) -> None:
        self.drafter.forget(target)


@pytest.mark.parametrize(("kind", "graphs"), [*((kind, False) for kind in (*HEADS, *EAGLES)), *GRAPH_KINDS])
def test_head_changes_no_token_and_knows_the_hidden_states_of_all_accepted_tokens(
    kind: str, graphs: bool, made: Callable[[str], Made]
) -> None:
    """With graphs, as on a GPU: the served model's graphs keep features, and drafts are launched ahead."""
    folder = made(kind).folder
    plain, _, most = served(folder, None)
    drafter = made(kind).drafter(ahead=graphs, graphs=graphs, captured_tokens=512 * graphs)
    if graphs:
        only_replays(drafter.steps.runner)
    tokens, scheduler, _ = served(folder, drafter, drafter, graphs=graphs)
    assert tokens == plain and scheduler.status.draft_tokens > 5
    corrected = Corrected(made(kind), drafter, plain)
    tokens, scheduler, steps = served(folder, corrected, drafter, graphs=graphs)
    assert tokens == plain and steps < most and corrected.compared > 9
    assert 0 < scheduler.status.accepted_tokens < scheduler.status.draft_tokens
    assert len(drafter.sequences) == 0, "everything is taken back"
    assert not drafter.failed


def held(length: int) -> HeadSequence:
    return HeadSequence.of(Sequence((b"f", 1), list(range(length)), 4, Sampling(9), 4), 0)


def states_at(start: int, end: int) -> torch.Tensor:
    return torch.arange(start, end)[:, None] * torch.ones(1, 3)


def test_head_begins_anew_after_a_gap_and_keeps_no_state_of_a_draft() -> None:
    one = held(10)
    one.read(0, states_at(0, 4))
    one.read(4, states_at(4, 14))  # the last five states belong to drafts
    assert one.follow() and one.own.tokens == [*range(1, 10)]
    assert torch.equal(one.take(9), states_at(0, 9))
    assert one.follow() and torch.equal(one.take(1), states_at(8, 9)), "asked again without a new token"
    one.target.tokens += [*range(10, 15)]
    assert not one.follow(), "the states of five tokens are missing"
    one.read(12, states_at(12, 14))
    assert one.follow() and one.first == 12 and torch.equal(one.take(2), states_at(12, 14))
    one.read(3, states_at(3, 14))  # the sequence was preempted, and is computed again
    assert one.first == 3 and one.follow() and torch.equal(one.take(11), states_at(3, 14))


def test_states_that_no_draft_needs_for_long_are_forgotten() -> None:
    one, length = held(8 * CONTEXT), 0
    while length < 8 * CONTEXT - 1:
        one.read(length, states_at(length, length + 9)[: 8 * CONTEXT - 1 - length])
        length = one.end
        assert one.unread_rows <= 2 * CONTEXT
    assert one.follow() and torch.equal(one.take(one.unread_rows), states_at(one.first, 8 * CONTEXT - 1))


def test_sequences_without_room_have_no_drafts(made: Callable[[str], Made]) -> None:
    drafter, (first, second) = made("qwen3_5").drafter(pool_bytes=0), sequences()[:2]
    for sequence in (first, second):
        sequence.tokens[:] = [9] * 70
        drafter.sequences.read(sequence, 0, torch.randn(69, drafter.hidden_states.width))
    assert [len(drafts) for drafts in drafter.propose([(first, 3), (second, 3)])] == [3, 0]
    drafter.forget(first)
    assert [len(drafts) for drafts in drafter.propose([(second, 3)])] == [3]
    second.tokens += [9] * 60
    drafter.sequences.read(second, 69, torch.randn(60, drafter.hidden_states.width))
    assert drafter.propose([(second, 3)]) == [()], "longer than the model allows"


def test_head_that_fails_drafts_no_more_and_fails_no_request(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drafter, calls = made("qwen3_5").folder, made("qwen3_5").drafter(), []

    def failing(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("unlucky")

    monkeypatch.setattr(drafter.steps, "launch", failing)
    assert served(folder, drafter, drafter)[0] == served(folder, None)[0] and len(calls) == 1
