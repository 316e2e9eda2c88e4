"""Checkpoints with eight-bit linears: each kind gives the logits of its dequantized weights."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config import ConfigError, ModelConfig, WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.model.harness import CPU, Oracle, all_logits, cache_for, prompts_of
from worker.engine.load import load_engine
from worker.kernels.linear import linear
from worker.kernels.quantize import dequantize, quantize
from worker.kernels.quantized_weight import INT4, INT8, quantize_groups
from worker.model.checkpoint import Checkpoint, CheckpointError, read_config
from worker.model.decoder import Decoder
from worker.model.families import spec_from_config
from worker.model.quantization.in_memory import in_memory
from worker.model.quantization.methods import method_of
from worker.model.source import FileSource
from worker.model.spec import StoredQuantization
from worker.model.staging import Staging
from worker.model.weights import Loader, load

State = dict[str, torch.Tensor]
CUDA = torch.device("cuda")


def logits(folder: Path, flag: str = "auto", device: torch.device = CPU) -> torch.Tensor:
    """Computed here, with weights that are kept as on `device`."""
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, flag, device)
    decoder = Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=False, memory=memory), 512)
    (prompt,) = prompts_of([40])
    return all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=40)[0]


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def rewrite(folder: Path, change: Callable[[State, str], Any], config: dict[str, Any] | None = None) -> Path:
    """Every linear of the layers is changed in the state, by its name."""
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if is_linear(name)]:
        change(state, name)
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | ({"quantization_config": config} if config else {})))
    return folder


def compressed(type: str, strategy: str, format: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": type, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


class Format:
    """Quantizes a weight in blocks, and writes its values and scales as a kind of checkpoint has them."""

    def __init__(
        self, config: dict[str, Any], kind: str, block: tuple[int, int], scale: str = "weight_scale", **shape: Any
    ) -> None:
        """`block`: rows and columns with one scale, 0 for all."""
        self.config, self.kind, self.block, self.scale = config, kind, block, scale
        self.flat, self.packed = shape.get("flat", False), shape.get("packed", False)

    def divided(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of the format [N, K], scales down and across."""
        rows, columns = weight.shape
        high, wide = self.block[0] or rows, self.block[1] or columns
        down, across = -(-rows // high), -(-columns // wide)
        scale, values = torch.empty(down, across), torch.empty(rows, columns)
        most = 127.0 if self.kind == "int8" else 448.0
        for i in range(down):
            for j in range(across):
                part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale[i, j] = weight[part].abs().max() / most
                values[part] = weight[part] / scale[i, j]
        return (values.round().to(torch.int8) if self.kind == "int8" else values.to(torch.float8_e4m3fn)), scale

    def write(self, state: State, name: str) -> None:
        values, scale = self.divided(state[name])
        module = name.removesuffix("weight")
        state[module + self.scale] = scale.reshape(()) if self.flat else scale
        state[module + "input_scale"] = torch.ones(1)
        if self.packed:
            del state[name]
            bytes_ = (values.to(torch.int32) + 128).reshape(len(values), -1, 4)
            state[module + "weight_packed"] = (bytes_ << torch.tensor([0, 8, 16, 24])).sum(-1).to(torch.int32)
            state[module + "weight_shape"] = torch.tensor(values.shape)
        else:
            state[name] = values

    def full(self, state: State, name: str) -> None:
        """The weight that this stands for."""
        values, scale = self.divided(state[name])
        high, wide = (one or size for one, size in zip(self.block, values.shape, strict=True))
        spread = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        state[name] = values.float() * spread[: len(values), : values.shape[1]]


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
FORMATS = {
    "int8 a row": Format(compressed("int", "channel", "int-quantized"), "int8", (1, 0)),
    "int8 a row, packed": Format(compressed("int", "channel", "pack-quantized"), "int8", (1, 0), packed=True),
    "int8 a group": Format(compressed("int", "group", "pack-quantized", group_size=32), "int8", (1, 32), packed=True),
    "fp8 a row": Format(compressed("float", "channel", "float-quantized"), "fp8", (1, 0)),
    "fp8 a tensor": Format(compressed("float", "tensor", "float-quantized"), "fp8", (0, 0)),
    "fp8 a tensor, plainly": Format(TENSOR, "fp8", (0, 0), flat=True),
    "fp8 a block": Format(BLOCKS, "fp8", (48, 32), "weight_scale_inv"),
}


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    return lambda kind, name="copy": Path(shutil.copytree(checkpoints(kind), tmp_path / name))


@pytest.mark.parametrize("model", ["llama-biased", "phi3"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoint_equals_its_dequantized_weights(copy: Callable[..., Path], name: str, model: str) -> None:
    form = FORMATS[name]
    folder = rewrite(copy(model), form.write, form.config)
    full = rewrite(copy(model, "full"), form.full)
    got = logits(folder)
    torch.testing.assert_close(got, logits(full), atol=1e-4, rtol=0)
    (prompt,) = prompts_of([40])
    torch.testing.assert_close(got, Oracle(full).logits(prompt), atol=1e-4, rtol=0)
    assert torch.equal(logits(full), logits(folder, "none"))


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
    """A row's scales are its own, so stacking changes nothing."""
    got = logits(checkpoints(model), flag)
    full = rewrite(copy(model), lambda state, name: state.update({name: by_hand(state[name])}))
    torch.testing.assert_close(got, logits(full), atol=1e-4, rtol=0)
    plain = logits(checkpoints(model))
    assert not torch.equal(got, plain)
    assert torch.nn.functional.cosine_similarity(got, plain).mean() > alike


def test_block_scales_are_quantized_again_only_on_a_gpu(copy: Callable[..., Path]) -> None:
    folder = rewrite(copy("llama"), FORMATS["fp8 a block"].write, BLOCKS)
    full = rewrite(copy("llama", "full"), FORMATS["fp8 a block"].full)
    torch.testing.assert_close(logits(folder, "fp8"), logits(full), atol=1e-4, rtol=0)
    assert torch.equal(logits(folder, "fp8", CUDA), logits(full, "fp8", CUDA))


@pytest.mark.parametrize("flag", ["auto", "int8"])
def test_unquantized_linears_of_a_quantized_checkpoint_stay_unquantized(copy: Callable[..., Path], flag: str) -> None:
    """A whole stack, and one part of another."""
    form = FORMATS["int8 a row"]

    def but_some(change: Callable[[State, str], Any]) -> Callable[[State, str], Any]:
        return lambda state, name: (
            None if "down_proj" in name or "layers.1.self_attn.k" in name else change(state, name)
        )

    folder = rewrite(copy("llama"), but_some(form.write), form.config)
    full = rewrite(copy("llama", "full"), but_some(form.full))
    torch.testing.assert_close(logits(folder, flag), logits(full), atol=1e-4, rtol=0)


def test_quantized_head_is_read(copy: Callable[..., Path]) -> None:
    form, head = FORMATS["fp8 a row"], "lm_head.weight"
    folder, full = copy("llama"), copy("llama", "full")
    for place, change in ((folder, form.write), (full, form.full)):
        state = load_file(place / "model.safetensors")
        change(state, head)
        save_file(state, place / "model.safetensors")
    got, expected = logits(rewrite(folder, form.write, form.config)), logits(rewrite(full, form.full))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["int8 a row, packed", "fp8 a tensor, plainly", "fp8 a block"])
def test_quantized_checkpoint_is_read_through_staging(copy: Callable[..., Path], name: str) -> None:
    """As for a GPU, in pieces that cut tensors, and of a scale without dimensions."""
    folder = rewrite(copy("llama"), FORMATS[name].write, FORMATS[name].config)
    spec, mapped, staged = spec_from_config(read_config(folder)), [], []
    for staging, told in ((None, mapped), (Staging(CPU, piece=1024, buffers=2), staged)):
        with closing(Checkpoint(folder, staging)) as checkpoint:
            source = FileSource(checkpoint, method_of(read_config(folder)))
            loader = Loader(source, spec, torch.float32, CPU, invariant=False)
            eye = torch.eye(spec.hidden_size)
            told += [linear(eye, layer.qkv) for layer in loader.load().layers]
    assert all(torch.equal(*pair) for pair in zip(mapped, staged, strict=True)) and len(mapped) == 3


def test_progress_includes_scales(copy: Callable[..., Path]) -> None:
    folder = rewrite(copy("llama"), FORMATS["int8 a row"].write, FORMATS["int8 a row"].config)
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
    """As the widened weights need it, or with a byte for each number of a linear and a float for each group."""
    state = load_file(copy("qwen2") / "model.safetensors")
    numbers = sum(tensor.numel() for tensor in state.values())
    linears = [tensor for module, tensor in state.items() if is_linear(module)]
    assert {tensor.shape[1] for tensor in linears} == {64, 160}
    small = sum(tensor.numel() - 4 * len(tensor) * (groups if tensor.shape[1] == 64 else max(1, 5 * (groups - 1)))
                for tensor in linears)  # fmt: skip
    folder = rewrite(copy("qwen2", "quantized"), FORMATS[name].write, FORMATS[name].config)
    spec, told = spec_from_config(read_config(folder)), list[int]()
    for flag in ("none", "auto"):
        memory = in_memory(spec.stored, flag, CPU)
        load(folder, spec, torch.bfloat16, CPU, invariant=False, memory=memory, on_size=told.append)
    assert told == [2 * numbers, 2 * numbers - small]


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[State], Any], list[str]]] = {
    "no scale": (lambda state: state.pop(Q + "_scale"), [Q, "I8"]),
    "no values": (lambda state: state.pop(Q), [Q, "missing"]),
    "scales of another shape": (
        lambda state: state.update({Q + "_scale": torch.ones(64, 1)}),
        [Q + "_scale", "[64, 1]", "[128, 1]"],
    ),
    "values of another format": (
        lambda state: state.update({Q: state[Q].to(torch.float8_e4m3fn)}),
        [Q, "F8_E4M3", "I8"],
    ),
    "scales of another format": (
        lambda state: state.update({Q + "_scale": torch.ones(128, 1, dtype=torch.int8)}),
        [Q + "_scale", "I8", "BF16"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_wrong_tensor_is_named(copy: Callable[..., Path], case: str) -> None:
    change, words = BROKEN[case]
    folder = rewrite(copy("llama"), FORMATS["int8 a row"].write, FORMATS["int8 a row"].config)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        logits(folder)
    assert all(word in str(caught.value) for word in words), caught.value


UNSUPPORTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another method": ({"quant_method": "hqq", "bits": 4}, ["quant_method 'hqq'", "compressed-tensors", "fp8"]),
    "no method": ({"load_in_8bit": True}, ["quant_method None"]),
    "three bits": (compressed("int", "group", "pack-quantized", num_bits=3, group_size=128), ["3-bit int", "4- and 8"]),
    "asymmetric floats": (compressed("float", "channel", "float-quantized", symmetric=False), ["asymmetric"]),
    "an unknown format": (compressed("float", "channel", "marlin-24"), ["'marlin-24'", "float-quantized"]),
    "an unknown strategy": (compressed("float", "token", "float-quantized"), ["'token'", "channel"]),
    "a group without a size": (compressed("int", "group", "pack-quantized"), ["[1, None]"]),
    "groups of an odd size": (compressed("int", "group", "pack-quantized", group_size=40), ["40", "multiple of 16"]),
    "no weights": ({"quant_method": "compressed-tensors", "config_groups": {}}, ["config_groups"]),
    "other floats": ({"quant_method": "fp8", "fmt": "e5m2"}, ["'e5m2'", "e4m3"]),
    "a block in one number": ({"quant_method": "fp8", "weight_block_size": 128}, ["128"]),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_settings_are_named(copy: Callable[..., Path], case: str) -> None:
    config, words = UNSUPPORTED[case]
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(read_config(copy("llama")) | {"quantization_config": config})
    assert all(word in str(caught.value) for word in words), caught.value


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
    folder = rewrite(copy("llama"), FORMATS["fp8 a row"].write, FORMATS["fp8 a row"].config)
    caplog.set_level("INFO", "sluice.load")
    engine = load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", kv_cache_gb=0.01))
    engine.compiler.close()
    assert engine.dtype == "float32, fp8 weights"
    assert "(fp8, one scale for a row) are kept in few bits" in caplog.text
    assert "activations" in caplog.text
