"""Checkpoints with eight-bit linears of each kind give the logits of their dequantized weights."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, Oracle, all_logits, cache_for, prompts_of
from tests.worker.models.quantized_checkpoints import EIGHT_BITS, Format, is_linear, rewrite
from worker.checkpoint.checkpoint import Checkpoint, read_config
from worker.checkpoint.staging import Staging
from worker.engine.build import load_engine
from worker.kv_cache.sizing import WeightsSize
from worker.models import load as weights
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.load import FileSource, Loader, load
from worker.ops.linear import linear
from worker.ops.linear.packed import PackedLinear, pack_quantized
from worker.ops.quantized_weight import INT4, INT8, dequantize, quantize, quantize_groups
from worker.quantization.methods import in_memory, method_of
from worker.spec import StoredQuantization

CUDA = torch.device("cuda")


def logits(folder: Path, flag: str = "auto", device: torch.device = CPU) -> torch.Tensor:
    """Computes logits on the CPU, with weights stored as they would be on `device`."""
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, flag, device)
    decoder = Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=False, memory=memory), 512)
    (prompt,) = prompts_of([40])
    return all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=40)[0]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name="copy": Path(shutil.copytree(checkpoints(kind), tmp_path / name))


@pytest.mark.parametrize("model", ["llama-biased", "phi3"])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_quantized_checkpoint_equals_its_dequantized_weights(copy: Callable[..., Path], name: str, model: str) -> None:
    form = EIGHT_BITS[name]
    folder = rewrite(copy(model), form)
    full = rewrite(copy(model, "full"), form, widened=True)
    got = logits(folder)
    torch.testing.assert_close(got, logits(full), atol=1e-4, rtol=0)
    (prompt,) = prompts_of([40])
    torch.testing.assert_close(got, Oracle(full).logits(prompt), atol=1e-4, rtol=0)
    assert torch.equal(logits(full), logits(folder, "none"))


@pytest.mark.parametrize("model", ["llama-biased", "phi3"])
@pytest.mark.parametrize(
    "name", ["int8 a row", "int8 a row, packed", "fp8 a row", "fp8 a tensor", "fp8 a tensor, plainly", "int8 a group"]
)
def test_one_scale_for_a_row_is_for_kernels_of_a_gpu(
    copy: Callable[..., Path], name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a GPU get the stored values and scales of all linears; with finer scales, weights stay in groups."""
    given: list[torch.Tensor] = []

    def widened(values: torch.Tensor, scale: torch.Tensor, *more: Any, dynamic: bool, **how: Any) -> PackedLinear:
        given.append(values)
        return pack_quantized(values, scale, *more, dynamic=dynamic, **how)

    monkeypatch.setattr(weights, "pack_quantized", widened)
    folder, spec = rewrite(copy(model), EIGHT_BITS[name]), spec_from_config(read_config(copy(model, "plain")))
    got = logits(folder, "auto", CUDA)
    torch.testing.assert_close(got, logits(folder, "none"), atol=1e-4, rtol=0)
    assert len(given) == (0 if name == "int8 a group" else 4 * len(spec.layers))
    assert {values.dtype for values in given} <= {torch.int8, torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("flag", "by_hand", "alike"),
    [
        ("int8", lambda weight: quantize_groups(weight, INT8, 128).dequantize(torch.float32), 0.99),
        ("int4", lambda weight: quantize_groups(weight, INT4, 128).dequantize(torch.float32), 0.5),
        ("int4-g32", lambda weight: quantize_groups(weight, INT4, 32).dequantize(torch.float32), 0.6),
        ("fp8", lambda weight: dequantize(*quantize(weight, "fp8"), torch.float32), 0.95),
    ],
)
@pytest.mark.parametrize("model", ["qwen3-tied", "gemma3", "phi3"])
def test_flag_quantizes_linears(
    copy: Callable[..., Path],
    checkpoints: Checkpoints,
    model: str,
    flag: str,
    by_hand: Callable[[torch.Tensor], torch.Tensor],
    alike: float,
) -> None:
    """Each row has its own scales, so stacking linears changes nothing."""
    got = logits(checkpoints(model), flag)
    full = rewrite(copy(model), Format({}, lambda weight: ({}, by_hand(weight))), widened=True)
    torch.testing.assert_close(got, logits(full), atol=1e-4, rtol=0)
    plain = logits(checkpoints(model))
    assert not torch.equal(got, plain)
    assert torch.nn.functional.cosine_similarity(got, plain).mean() > alike


def test_block_scales_are_quantized_again_only_on_a_gpu(copy: Callable[..., Path]) -> None:
    folder = rewrite(copy("llama"), EIGHT_BITS["fp8 a block"])
    full = rewrite(copy("llama", "full"), EIGHT_BITS["fp8 a block"], widened=True)
    torch.testing.assert_close(logits(folder, "fp8"), logits(full), atol=1e-4, rtol=0)
    assert torch.equal(logits(folder, "fp8", CUDA), logits(full, "fp8", CUDA))


@pytest.mark.parametrize("flag", ["auto", "int8"])
def test_unquantized_linears_of_a_quantized_checkpoint_stay_unquantized(copy: Callable[..., Path], flag: str) -> None:
    """In one stack of linears, no linear is quantized; in another stack, one of three linears is not quantized."""
    form = EIGHT_BITS["int8 a row"]

    def some(name: str) -> bool:
        return is_linear(name) and "down_proj" not in name and "layers.1.self_attn.k" not in name

    folder = rewrite(copy("llama"), form, which=some)
    full = rewrite(copy("llama", "full"), form, widened=True, which=some)
    torch.testing.assert_close(logits(folder, flag), logits(full), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["int8 a row, packed", "fp8 a tensor, plainly", "fp8 a block"])
def test_quantized_checkpoint_is_read_through_staging(copy: Callable[..., Path], name: str) -> None:
    """Reads weights as for a GPU, in pieces whose borders lie within tensors, and a scale without dimensions."""
    folder = rewrite(copy("llama"), EIGHT_BITS[name])
    spec, mapped, staged = spec_from_config(read_config(folder)), [], []
    for staging, told in ((None, mapped), (Staging(CPU, piece=1024, buffers=2), staged)):
        with closing(Checkpoint(folder, staging)) as checkpoint:
            source = FileSource(checkpoint, method_of(read_config(folder)))
            loader = Loader(source, spec, torch.float32, CPU, invariant=False)
            eye = torch.eye(spec.hidden_size)
            told += [linear(eye, layer.mixer.qkv) for layer in loader.load().layers]
    assert all(torch.equal(*pair) for pair in zip(mapped, staged, strict=True)) and len(mapped) == 3


def test_progress_includes_scales(copy: Callable[..., Path]) -> None:
    folder = rewrite(copy("llama"), EIGHT_BITS["int8 a row"])
    seen: list[tuple[int, int]] = []
    spec = spec_from_config(read_config(folder))
    load(folder, spec, torch.float32, CPU, invariant=False, on_progress=lambda *at: seen.append(at))
    state = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for name, tensor in state.items() if not name.endswith("input_scale"))
    assert seen[0] == (0, total) and seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("name", "groups"), [("int8 a row", 1), ("int8 a row, packed", 1), ("int8 a group", 2), ("fp8 a block", 2)]
)
def test_on_size_gets_the_needed_bytes(copy: Callable[..., Path], name: str, groups: int) -> None:
    """The needed bytes are those of widened weights, or one byte for each number of a linear and two for each group."""
    state = load_file(copy("qwen2") / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in state.values())
    linears = [tensor for module, tensor in state.items() if is_linear(module)]
    assert {tensor.shape[1] for tensor in linears} == {64, 160}
    small = sum(tensor.numel() - 2 * len(tensor) * (groups if tensor.shape[1] == 64 else max(1, 5 * (groups - 1)))
                for tensor in linears)  # fmt: skip
    folder = rewrite(copy("qwen2", "quantized"), EIGHT_BITS[name])
    spec, told = spec_from_config(read_config(folder)), list[WeightsSize]()
    for flag in ("none", "auto"):
        memory = in_memory(spec.stored, flag, CPU)
        load(folder, spec, torch.bfloat16, CPU, invariant=False, memory=memory, on_size=told.append)
    assert [size.nbytes for size in told] == [2 * numbers, 2 * numbers - small]


ROW, BLOCK = StoredQuantization("fp8", "a row", True), StoredQuantization("fp8", "128 x 128 values", False, "other")
BOTH = StoredQuantization("fp8", "a row", True, activations="dynamic")
FIXED = StoredQuantization("fp8", "a row", True, activations="other")
INT4_GROUPS = StoredQuantization("int4", "1 x 128 values")


@pytest.mark.parametrize(
    ("stored", "flag", "cpu", "gpu"),
    [
        (None, "auto", "", ""), (None, "none", "", ""), (None, "fp8", "fp8", "fp8"), (None, "int8", "int8", "int8"),
        (None, "int8-dynamic", "int8", "int8-dynamic"), (None, "int4", "int4", "int4"),
        (ROW, "auto", "fp8", "fp8"), (ROW, "none", "", ""), (ROW, "fp8", "fp8", "fp8"),
        (ROW, "fp8-dynamic", "fp8", "fp8-dynamic"), (BOTH, "auto", "fp8", "fp8-dynamic"), (BOTH, "none", "", ""),
        (BOTH, "fp8", "fp8", "fp8"), (FIXED, "auto", "fp8", "fp8"), (FIXED, "fp8-dynamic", "fp8", "fp8-dynamic"),
        (BLOCK, "auto", "fp8", "fp8"), (BLOCK, "fp8-dynamic", "fp8", "fp8-dynamic"),
        (INT4_GROUPS, "auto", "int4", "int4"), (INT4_GROUPS, "int4-g32", "int4", "int4"),
    ],
)  # fmt: skip
def test_format_in_memory_follows_flag_and_checkpoint(
    stored: StoredQuantization | None, flag: str, cpu: str, gpu: str
) -> None:
    here, there = in_memory(stored, flag, CPU), in_memory(stored, flag, CUDA)
    assert (here.name, there.name) == (cpu, gpu) and here.by_row is None
    assert here.widen is there.widen is (flag == "none")


@pytest.mark.parametrize(
    ("stored", "flag"),
    [(ROW, "int8"), (ROW, "int4"), (BLOCK, "int8-dynamic"), (INT4_GROUPS, "int8"), (INT4_GROUPS, "fp8-dynamic"),
     (StoredQuantization("nf4"), "int4"), (StoredQuantization("int8 and int4"), "int8")],
)  # fmt: skip
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_contradicting_flag_is_named(stored: StoredQuantization, flag: str, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=rf"--quantization {flag} .* {stored.kind}"):
        in_memory(stored, flag, device)


def test_engine_dtype_names_the_scheme(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = rewrite(copy("llama"), EIGHT_BITS["fp8 a row"])
    caplog.set_level("INFO", "sluice.load")
    engine = load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", kv_cache_gb=0.01))
    engine.compiler.close()
    assert engine.dtype == "float32, fp8 weights"
    assert "(fp8, one scale for a row) are kept in few bits" in caplog.text
    assert "activations" in caplog.text
