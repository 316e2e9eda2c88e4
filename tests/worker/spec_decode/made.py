"""Makes a served model with a drafting head, and compares the head's drafts with drafts of plain PyTorch."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import Sampling
from tests.checkpoints import VOCAB
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner import runner
from worker.model_runner.inputs import build_inputs, dummy_sequence
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Chunk, Row, Sequence
from worker.spec_decode.head_drafter import Head, HeadDrafter


@dataclass(frozen=True)
class Made:
    """A served model with a head. propose: returns drafts and their logits by plain PyTorch."""

    folder: Path
    load: Callable[[Decoder], Head]
    propose: Callable[[list[int], int], tuple[list[int], torch.Tensor]]

    @property
    def target(self) -> Decoder:
        return batch_invariant_decoder(self.folder, torch.float32)

    def drafter(self, pool_bytes: int = 1 << 30, **how: Any) -> HeadDrafter:
        return HeadDrafter(self.load(self.target), self.target.spec, pool_bytes, **how)

    @torch.inference_mode()
    def hidden_states(self, drafter: HeadDrafter, tokens: list[int]) -> torch.Tensor:
        """Returns the hidden states [N, W] of the tokens, which the drafter reads."""
        target = self.target
        groups = cache_groups(target.spec, MAX_SEQ_LEN, paged=True)
        sequence = dummy_sequence(tokens, 16, len(groups), Sampling(1))
        for pages in sequence.pages:
            pages[:] = type(pages)("i", range(1, 1 + len(pages)))
        kv = KVCache(
            target.spec, [20] * len(groups), 16, torch.float32, "cpu", groups, state_slots=4, state_dtype=torch.float32
        )
        chunk = Chunk(sequence, 0, len(tokens), False)
        inputs, _ = build_inputs([chunk], 16, kv.device, recurrent=target.spec.recurrent)
        object.__setattr__(inputs, "logits_indices", torch.arange(len(tokens)))
        return drafter.hidden_states.of_step(target, inputs, kv)[1]


def check_proposals(one: Made, monkeypatch: pytest.MonkeyPatch, vocab: int = VOCAB, *, ahead: bool = False) -> None:
    """Asserts that four drafts and their logits equal those of plain PyTorch, and checks the positions of draws.

    ahead: as for HeadDrafter
    """
    logits: list[torch.Tensor] = []
    drawn: list[Row] = []

    def noting(of: torch.Tensor, rows: list[Row], *others: Any) -> torch.Tensor:
        logits.append(of[0].clone())
        drawn.extend(rows)
        return original(of, rows, *others)

    original = runner.sample_rows  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "sample_rows", noting)
    draw = random.Random(5)
    tokens = [draw.randrange(3, vocab) for _ in range(draw.randint(20, 60))]
    sequence = Sequence((b"f", 1), tokens, len(tokens) - 1, Sampling(9, temperature=0.0), 4)
    drafter = one.drafter(ahead=ahead)
    states = one.hidden_states(drafter, tokens[:-1])
    drafter.sequences.read(sequence, 0, states[:11])
    drafter.sequences.read(sequence, 11, states[11:])
    drafts = drafter.propose([(sequence, 4)])
    expected, of_reference = one.propose(tokens, 4)
    ids, of_drafter = drafter.head.target_ids, torch.stack(logits)
    if ids is not None:
        rest = of_drafter.index_fill(1, ids, -torch.inf)
        assert bool((rest == -torch.inf).all()), "tokens that the head lacks are never drafted"
        of_drafter = of_drafter[:, ids]
    torch.testing.assert_close(of_drafter, of_reference, rtol=1e-3, atol=1e-3)
    assert drafts == [tuple(expected)]
    assert [(own.sampling, own.seed, output) for own, output, _ in drawn] == [
        (sequence.sampling, sequence.seed, output) for output in range(1, 5)
    ], "as the tokens themselves will be drawn"
