"""Outputs of inner layers that stages hand on: those of the whole model, in several steps in flight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.worker.distributed.staged import parts_for, spec_of, staged
from tests.worker.models.harness import CPU, advance, cache_for, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import Part

pytestmark = needs_library
LENGTHS = [1, 5, 16, 17, 40, 70]


def with_aux_hidden_states(inputs: ForwardInputs, layers: tuple[int, ...], hidden: int) -> tuple[ForwardInputs, Tensor]:
    outputs = torch.full((len(layers), len(inputs.logits_indices), hidden), torch.nan)
    return replace(inputs, aux_hidden_states=tuple(zip(layers, outputs, strict=True))), outputs


def check_steps(folder: Path, parts: tuple[Part, ...], layers: tuple[int, ...]) -> None:
    """Checks steps of prompts and of decodes; one wants all rows, and one has rows of prompts alone, and wants none."""
    spec = spec_of(folder)
    whole = Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=True), 512)
    cache = cache_for(whole, tokens=512)
    model, rows = fastest_decoder(whole, cache), rows_for(cache, prompts_of(LENGTHS), 0)
    begun = list[tuple[ForwardInputs, Any, Tensor, Tensor, Tensor]]()
    with staged(folder, parts, torch.float32) as shared, torch.inference_mode():
        for number, chunk in enumerate([33, 1, 33, 1]):
            steps = advance(rows, chunk)
            inputs = pack(steps, cache.page_size, all_rows=number == 2)
            if number == 3:
                inputs = replace(inputs, logits_indices=inputs.logits_indices[:0])
            wanted, expected = with_aux_hidden_states(inputs, layers, spec.hidden_size)
            result = model.hidden(wanted, cache).clone()
            own, found = with_aux_hidden_states(inputs, layers, spec.hidden_size)
            begun.append((own, shared.begin(own), found, result, expected))
            for row, length in steps:
                row.advance(length)
        for own, step, found, result, expected in begun:  # all of them are in flight
            assert torch.equal(step.hidden(own, None), result)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 0), (1,)])
@pytest.mark.parametrize("kind", ["llama", "olmo2", "qwen3_5"])
def test_stages_hand_on_the_aux_hidden_states(
    checkpoints: Checkpoints, kind: str, layers: tuple[int, ...], stages: int
) -> None:
    folder = checkpoints(kind)
    check_steps(folder, parts_for(spec_of(folder), stages), layers)


def test_they_are_beside_per_layer_embeddings(checkpoints: Checkpoints) -> None:
    folder = checkpoints("gemma4-inputs")
    check_steps(folder, parts_for(spec_of(folder), 4), (3, 1, 0))
    check_steps(folder, parts_for(spec_of(folder), 3), (2, 1))


def test_stages_of_two_ranks_each_hand_them_on(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    check_steps(folder, parts_for(spec_of(folder), 3, tp_size=2), (0, 1, 2))
