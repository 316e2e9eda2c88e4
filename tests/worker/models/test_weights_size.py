"""The predicted size of weights, before they are read, equals their size in memory."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shared.gguf.translated import translated
from tests.checkpoints import Checkpoints
from tests.gguf_files import mixed, mxfp4, write
from tests.worker.models.harness import CPU
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.kv_cache.sizing import WeightsSize
from worker.models.config import spec_from_config
from worker.models.load import load
from worker.ops import native as c_library
from worker.quantization.methods import in_memory


def predicted_and_found(folder: Path, flag: str, dtype: torch.dtype) -> tuple[WeightsSize, int]:
    spec, sizes = spec_from_config(read_config(folder)), list[WeightsSize]()
    memory = in_memory(spec.stored, flag, CPU)
    weights = load(folder, spec, dtype, CPU, invariant=False, memory=memory, on_size=sizes.append)
    return sizes[0], weights.nbytes


@needs_library
def test_prediction_counts_the_weights_of_heads(checkpoints: Checkpoints) -> None:
    """The prediction leaves out padding, which these small heads have much of, so the stored sizes are the oracle."""
    folder = checkpoints("deepseek-v2")
    predicted, found = predicted_and_found(folder, "none", torch.float32)
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: 4 * math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert predicted.nbytes == sum(sizes.values()) <= found
    heads = [name for name in sizes if "kv_b_proj" in name]
    assert len(heads) == 3 and all(sizes[name] for name in heads)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("types", ["BF16", "Q4_0", "IQ1_M", "mixed", "mxfp4"])
def test_prediction_for_gguf_files_is_close(kind: str, types: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The prediction leaves out vectors and padding."""
    written = write(kind, tmp_path, {"mixed": mixed, "mxfp4": mxfp4}.get(types, types))
    predicted, found = predicted_and_found(translated([written.file], tmp_path / "cache"), "auto", dtype)
    assert predicted.nbytes == pytest.approx(found, rel=0.03)


@needs_library
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mixtral"])
def test_prediction_for_int4_is_what_int4_takes(checkpoints: Checkpoints, kind: str) -> None:
    plain, found = predicted_and_found(checkpoints(kind), "none", torch.bfloat16)
    quantized, small = predicted_and_found(checkpoints(kind), "int4", torch.bfloat16)
    assert plain.int4 == quantized.nbytes < plain.nbytes and quantized.int4 is None
    assert plain.nbytes == pytest.approx(found, rel=0.05) and quantized.nbytes == pytest.approx(small, rel=0.1)


def test_without_c_kernels_weights_are_widened(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "available", lambda dtype: False)
    plain, _ = predicted_and_found(checkpoints("llama"), "none", torch.bfloat16)
    quantized, _ = predicted_and_found(checkpoints("llama"), "int4", torch.bfloat16)
    assert plain.nbytes == quantized.nbytes


def test_advice_is_given_only_if_it_helps() -> None:
    size = WeightsSize(8 << 30, int4=2 << 30)
    assert size.fewer_bits(2 << 30) == ["serve it with --quantization int4, which needs 2.0 GiB for its weights"]
    assert not size.fewer_bits(1 << 30) and not replace(size, int4=None).fewer_bits(9 << 30)
