"""A draft model proposes its own greedy or seeded text, and changes no token of an answer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.spec_decode.harness import only_replays, sequences, served
from worker.models.decoder import Decoder
from worker.spec_decode.model_drafter import CATCH_UP, ModelDrafter

AS_ON_GPU = {"ahead": True, "graphs": True}  # on the CPU, a replay computes the step again


def drafter_of(
    folder: Path, pool_bytes: int = 1 << 30, longest: int = MAX_SEQ_LEN, how: dict[str, bool] | None = None
) -> ModelDrafter:
    target = batch_invariant_decoder(folder, torch.float32)
    decoder = Decoder(target.spec, target.weights, MAX_SEQ_LEN)  # the drafter's own decoder
    return ModelDrafter(decoder, longest, pool_bytes, **how or {})


@pytest.mark.parametrize(
    ("target", "draft", "how"),
    [
        ("llama", "llama", {}),
        ("llama", "qwen3", {}),
        ("qwen3", "qwen3_5", {}),
        ("qwen3_5", "qwen3_5", {}),
        ("gemma3", "gemma3", {}),
        ("llama", "qwen3", AS_ON_GPU),
        ("qwen3_5", "qwen3_5", AS_ON_GPU),
    ],
)
def test_drafts_of_a_model_change_no_token(
    target: str, draft: str, how: dict[str, bool], checkpoints: Checkpoints
) -> None:
    plain, _, most = served(checkpoints(target), None)
    drafter = drafter_of(checkpoints(draft), how=how)
    if how:
        only_replays(drafter.steps.runner)
    tokens, scheduler, steps = served(checkpoints(target), drafter, graphs=bool(how))
    assert tokens == plain and not drafter.failed
    status = scheduler.status
    assert status.draft_tokens > 4 and len(drafter.sequences) == 0, "and everything is taken back"
    if target == draft:  # even sampled tokens are predicted, but penalties are not
        assert status.accepted_tokens > 0.9 * status.draft_tokens and steps < 0.7 * most


@pytest.mark.parametrize("how", [{}, AS_ON_GPU])
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_drafts_are_the_models_own_text_whatever_was_rejected(
    kind: str, how: dict[str, bool], checkpoints: Checkpoints
) -> None:
    """After right and wrong drafts, the drafter proposes the same as a new drafter that gets all tokens at once."""
    drafter, draw = drafter_of(checkpoints(kind), how=how), random.Random(3)
    made = sequences()[:3]
    for sequence in made:
        sequence.tokens += [5]
    for _ in range(6):
        wanted = [(sequence, draw.randint(1, 5)) for sequence in made]
        drafts = drafter.propose(wanted)
        assert drafts == drafter_of(checkpoints(kind)).propose(wanted)
        assert [len(each) for each in drafts] == [count for _, count in wanted]
        for sequence, each in zip(made, drafts, strict=True):
            sequence.tokens += [*each[: draw.randint(0, len(each))], draw.randrange(3, VOCAB)]
    for sequence in made:
        drafter.forget(sequence)
        drafter.forget(sequence)
    assert len(drafter.sequences) == 0


def test_long_prompt_is_read_in_parts_and_delays_no_other_sequence(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.spec_decode.model_drafter.CATCH_UP", 20)
    drafter, (first, second) = drafter_of(checkpoints("llama")), sequences()[:2]
    first.tokens, second.tokens = [9] * 50, [8, 7, 6]
    counts = [[len(drafts) for drafts in drafter.propose([(first, 2), (second, 2)])] for _ in range(4)]
    assert counts == [[0, 2], [0, 2], [2, 2], [2, 2]] and CATCH_UP > 20


def test_sequences_without_room_or_beyond_the_model_have_no_drafts(checkpoints: Checkpoints) -> None:
    drafter, made = drafter_of(checkpoints("llama"), pool_bytes=0, longest=64), sequences()
    made[0].tokens, made[1].tokens, made[2].tokens = [9] * 50, [8] * 20, [7] * 61
    wanted = [(sequence, 4) for sequence in made[:3]]
    assert [len(drafts) for drafts in drafter.propose(wanted)] == [4, 0, 0]
    drafter.forget(made[0])
    assert [len(drafts) for drafts in drafter.propose(wanted[1:])] == [4, 0]


def test_model_that_fails_drafts_no_more_and_fails_no_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama")
    plain, _, _ = served(folder, None)
    drafter, calls = drafter_of(folder), []

    def failing(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("unlucky")

    monkeypatch.setattr(drafter.steps, "launch", failing)
    assert served(folder, drafter)[0] == plain and len(calls) == 1
