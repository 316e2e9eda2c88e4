"""Per-layer embeddings: the memory of their table, and the other tensors that checkpoints may hold."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from worker.models.decoder import Decoder


def logits(decoder: Decoder) -> torch.Tensor:
    return torch.cat(all_logits(decoder, cache_for(decoder, tokens=128), prompts_of([20]), chunk=20))


def test_table_keeps_16_bits_in_a_float32_model(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("gemma4", dtype=torch.bfloat16))
    inputs = decoder.weights.per_layer_inputs
    assert inputs is not None and inputs.table.dtype == torch.bfloat16 and decoder.weights.embed.dtype == torch.float32


def test_projections_of_layers_that_share_kv_are_not_read(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints("gemma4"), tmp_path / "more"))
    more = {f"model.layers.5.self_attn.{name}.weight": torch.full((3,), torch.nan) for name in ("k_proj", "k_norm")}
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(decoder_of(folder)), logits(decoder_of(checkpoints("gemma4"))))
