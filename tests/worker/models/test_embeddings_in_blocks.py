"""On a CPU, embeddings of GGUF files stay in the blocks of the file, and change no bit of what is computed."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.gguf.translated import translated
from tests.checkpoints import Checkpoints
from tests.gguf_files import mixed, write
from tests.worker.models.harness import CPU, all_logits, cache_for, prompts_of
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder, Weights
from worker.models.load import load
from worker.models.sharding import Share, Stage
from worker.ops import block_rows
from worker.ops import native as c_library
from worker.ops.embedding import plain
from worker.quantization.methods import in_memory

pytestmark = needs_library
DTYPES = [torch.float32, torch.bfloat16]
TIED = ("gemma3", "gemma4")
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    @cache
    def folder(kind: str) -> Path:
        place = tmp_path_factory.mktemp("blocks")
        return translated([write(kind, place, mixed).file], place / "cache")

    return folder


def loaded(folder: Path, dtype: torch.dtype, flag: str = "auto", **part: Share | Stage) -> Weights:
    spec = spec_from_config(read_config(folder))
    return load(folder, spec, dtype, CPU, invariant=True, memory=in_memory(spec.stored, flag, CPU), **part)


def logits(folder: Path, weights: Weights, *, in_c: bool) -> list[Tensor]:
    decoder = Decoder(spec_from_config(read_config(folder)), weights, 256)
    pool = cache_for(decoder, tokens=256)
    return all_logits(fastest_decoder(decoder, pool) if in_c else decoder, pool, prompts_of([5, 40]), chunk=16)


def widened(weights: Weights) -> Weights:
    """Returns the weights with embeddings as they would be without blocks."""
    inputs = weights.per_layer_inputs
    inputs = None if inputs is None else replace(inputs, table=plain(inputs.table.table()))
    return replace(weights, embed=plain(weights.embed.table()), per_layer_inputs=inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4", "granite", "gpt-oss"])
def test_no_bit_of_the_logits_changes(kind: str, dtype: torch.dtype, folders: Folder) -> None:
    """Untied and tied, with a scale, with per-layer embeddings; by the loop in C and by that in Python."""
    folder = folders(kind)
    weights = loaded(folder, dtype)
    assert weights.embed.blocks is not None and weights.embed.blocks.name == "Q6_K"
    assert (weights.embed.head is weights.head.cpu) == (kind in TIED), "a tied head has the codes of both"
    for in_c in (True, False):
        pairs = zip(*(logits(folder, one, in_c=in_c) for one in (weights, widened(weights))), strict=True)
        assert all(torch.equal(ours, expected) and ours.any() for ours, expected in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_is_that_of_an_unquantized_model(dtype: torch.dtype, folders: Folder) -> None:
    for kind in ("llama", "gemma4"):
        weights, full = loaded(folders(kind), dtype), loaded(folders(kind), dtype, "none")
        assert full.embed.blocks is None and torch.equal(weights.embed.table(), full.embed.stored)
        assert weights.embed.nbytes < full.embed.nbytes / 2
        inputs, of_full = weights.per_layer_inputs, full.per_layer_inputs
        assert (inputs is None) == (of_full is None) == (kind == "llama")
        if inputs is not None and of_full is not None:
            assert inputs.table.blocks is not None and torch.equal(inputs.table.table(), of_full.table.stored)


def test_ranks_and_stages_have_them_too(folders: Folder) -> None:
    folder = folders("llama")
    whole, layers = loaded(folder, torch.bfloat16), 2
    first = Stage(0, (0, 1, layers))
    for one in (loaded(folder, torch.bfloat16, share=Share(1, 2)), loaded(folder, torch.bfloat16, stage=first)):
        assert one.embed.blocks is whole.embed.blocks and torch.equal(one.embed.stored, whole.embed.stored)
    behind = loaded(folder, torch.bfloat16, stage=replace(first, index=1))
    assert behind.embed.shape == (1, 256) and behind.embed.blocks is None


def test_without_the_library_and_in_float16_they_are_widened(folders: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(folders("llama"), torch.float16).embed.blocks is None
    expected = loaded(folders("llama"), torch.bfloat16).embed.table()
    monkeypatch.setattr(c_library, "available", lambda dtype: False)
    monkeypatch.setattr(block_rows, "kernels", dict)
    found = loaded(folders("llama"), torch.bfloat16).embed
    assert found.blocks is None and torch.equal(found.stored, expected)


def test_embeddings_of_other_checkpoints_are_tensors(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama")
    for flag in ("auto", "int4"):
        assert loaded(folder, torch.bfloat16, flag).embed.blocks is None
