"""Quantized checkpoints that contradict themselves are refused in one sentence that names the file and the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, decoder_of
from tests.worker.models.quantized_checkpoints import FORMATS, State, compressed, eight_bits, is_linear, rewrite, save
from worker.checkpoint.checkpoint import CheckpointError, read_config
from worker.models.config import spec_from_config
from worker.models.load import load
from worker.quantization.methods import in_memory

GATE, DOWN = "model.layers.1.mlp.gate_proj.", "model.layers.2.mlp.down_proj."
NAN, INF = float("nan"), float("inf")
Change = Callable[[Tensor], Tensor]


def put(value: float, at: int = 3) -> Change:
    """Returns a function that changes one number of a tensor."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


def fewer(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def narrower(tensor: Tensor) -> Tensor:
    return tensor[:, :-1]


def text(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Returns a function that changes a tensor that holds JSON."""

    def changed(tensor: Tensor) -> Tensor:
        state = json.loads(bytes(tensor.tolist()))
        change(state)
        return torch.tensor(list(json.dumps(state).encode())).byte()

    return changed


LIES: list[tuple[str, str, Change | None, list[str]]] = [
    # format, tensor, change (None: the tensor is removed), words of the error
    ("gptq", GATE + "qweight", None, [GATE + "weight", "missing"]),
    ("gptq", GATE + "qzeros", None, [GATE + "qzeros", "missing"]),
    ("gptq", GATE + "scales", None, [GATE + "scales", "missing"]),
    ("gptq", GATE + "qweight", fewer, [GATE + "qweight", "[7, 160]", "[8, 160]"]),
    ("gptq", GATE + "qweight", lambda tensor: tensor.T, [GATE + "qweight", "[160, 8]", "[8, 160]"]),
    ("gptq", GATE + "qweight", lambda tensor: tensor.float(), [GATE + "qweight", "F32", "I32"]),
    ("gptq", GATE + "qzeros", narrower, [GATE + "qzeros", "[2, 19]", "[2, 20]"]),
    ("gptq", GATE + "scales", fewer, [GATE + "scales", "[1, 160]", "[2, 160]"]),
    ("gptq", GATE + "scales", lambda tensor: tensor.int(), [GATE + "scales", "I32", "F16"]),
    ("gptq", GATE + "scales", put(NAN), [GATE + "scales", "not finite"]),
    ("gptq", GATE + "scales", put(INF), [GATE + "scales", "not finite"]),
    ("gptq", GATE + "g_idx", put(2), [GATE + "g_idx", "32 inputs"]),
    ("gptq, act-order", GATE + "g_idx", None, [GATE + "g_idx", "missing"]),
    ("gptq, act-order", GATE + "g_idx", put(2), [GATE + "g_idx", "32 inputs"]),
    ("gptq, act-order", GATE + "g_idx", put(-1), [GATE + "g_idx", "32 inputs"]),
    ("gptq, act-order", GATE + "g_idx", put(1 << 30), [GATE + "g_idx", "32 inputs"]),
    ("gptq, act-order", GATE + "g_idx", torch.zeros_like, [GATE + "g_idx", "32 inputs"]),
    ("gptq, act-order", GATE + "g_idx", fewer, [GATE + "g_idx", "[63]", "[64]"]),
    ("awq", GATE + "qweight", None, [GATE + "weight", "missing"]),
    ("awq", GATE + "qzeros", None, [GATE + "qzeros", "missing"]),
    ("awq", GATE + "qweight", narrower, [GATE + "qweight", "[64, 19]", "[64, 20]"]),
    ("awq", GATE + "scales", fewer, [GATE + "scales", "[1, 160]", "[2, 160]"]),
    ("awq", GATE + "scales", put(-INF), [GATE + "scales", "not finite"]),
    ("int4 a group", GATE + "weight_packed", None, [GATE + "weight_packed", "missing"]),
    ("int4 a group", GATE + "weight_scale", None, [GATE + "weight", "missing"]),
    ("int4 a group", GATE + "weight_packed", narrower, [GATE + "weight_packed", "[160, 7]", "[160, 8]"]),
    ("int4 a group", GATE + "weight_scale", narrower, [GATE + "weight_scale", "[160, 1]", "[160, 2]"]),
    ("int4 a group", GATE + "weight_scale", put(NAN), [GATE + "weight_scale", "not finite"]),
    ("int4 a group, asymmetric", GATE + "weight_zero_point", None, [GATE + "weight_zero_point", "missing"]),
    ("int4 a group, asymmetric", GATE + "weight_zero_point", fewer, [GATE + "weight_zero_point", "[19, 2]", "[20, 2]"]),
    ("int4 a group, act-order", GATE + "weight_g_idx", None, [GATE + "weight_g_idx", "missing"]),
    (
        "int4 a group, act-order",
        GATE + "weight_g_idx",
        lambda index: torch.full_like(index, -1),
        [GATE + "weight_g_idx", "32 inputs"],
    ),
    ("int4 a group, act-order", GATE + "weight_g_idx", put(5), [GATE + "weight_g_idx", "32 inputs"]),
    ("int8 a row, asymmetric", GATE + "weight_zero_point", None, [GATE + "weight_zero_point", "missing"]),
    ("int8 a row", GATE + "weight", lambda tensor: tensor.byte(), [GATE + "weight", "U8", "I8"]),
    ("int8 a row", GATE + "weight", None, [GATE + "weight", "missing"]),
    ("int8 a row", GATE + "weight", lambda tensor: tensor.to(torch.float8_e4m3fn), [GATE + "weight", "F8_E4M3", "I8"]),
    ("int8 a row", GATE + "weight_scale", None, [GATE + "weight", "I8", "BF16"]),
    ("int8 a row", GATE + "weight_scale", lambda tensor: tensor[:64], [GATE + "weight_scale", "[64, 1]", "[160, 1]"]),
    ("int8 a row", GATE + "weight_scale", lambda tensor: tensor.char(), [GATE + "weight_scale", "I8", "BF16"]),
    ("fp8 a row", GATE + "weight_scale", put(INF), [GATE + "weight_scale", "not finite"]),
    ("fp8 a row", GATE + "weight", put(NAN), [GATE + "weight", "NaN"]),
    ("mxfp4", GATE + "weight_blocks", None, [GATE + "weight", "missing"]),
    ("mxfp4", GATE + "weight_blocks", fewer, [GATE + "weight_blocks", "[159, 2, 16]", "[160, 2, 16]"]),
    ("mxfp4", GATE + "weight_scales", None, [GATE + "weight_scales", "missing"]),
    ("mxfp4", GATE + "weight_scales", put(255), [GATE + "weight_scales", "not finite"]),
    ("mxfp4, compressed-tensors", GATE + "weight_packed", narrower, [GATE + "weight_packed", "[160, 31]", "[160, 32]"]),
    ("mxfp8, modelopt", GATE + "weight", put(NAN), [GATE + "weight", "NaN"]),
    ("mxfp8, modelopt", GATE + "weight_scale", put(255), [GATE + "weight_scale", "not finite"]),
    ("mxfp8, modelopt", GATE + "weight_scale", narrower, [GATE + "weight_scale", "[160, 1]", "[160, 2]"]),
    ("nvfp4, modelopt", GATE + "weight", narrower, [GATE + "weight", "[160, 31]", "[160, 32]"]),
    ("nvfp4, modelopt", GATE + "weight_scale", put(NAN), [GATE + "weight_scale", "not finite"]),
    ("nvfp4, modelopt", GATE + "weight_scale", lambda x: x.float(), [GATE + "weight_scale", "F32", "F8_E4M3"]),
    ("nvfp4, modelopt", GATE + "weight_scale_2", put(INF, 0), [GATE + "weight_scale_2", "not finite"]),
    ("nvfp4, modelopt", GATE + "weight_scale_2", None, [GATE + "weight_scale_2", "missing"]),
    ("nvfp4, compressed-tensors", GATE + "weight_global_scale", None, [GATE + "weight_global_scale", "missing"]),
    ("nvfp4, compressed-tensors", GATE + "weight_global_scale", put(0, 0), [GATE + "weight_global_scale", "is 0"]),
    ("nvfp4, compressed-tensors", GATE + "weight_global_scale", put(1e-39, 0), [GATE + "weight", "not finite"]),
    ("auto-round, gptq", GATE + "qzeros", None, [GATE + "qzeros", "missing"]),
    ("nf4", DOWN + "weight", fewer, [DOWN + "weight", "[5119, 1]", "[5120, 1]"]),
    ("nf4", DOWN + "weight.absmax", None, [DOWN + "weight", "[5120, 1]", "[64, 160]"]),
    ("nf4", DOWN + "weight.absmax", fewer, [DOWN + "weight.quant_state", "[64, 160]", "blocks of 32"]),
    ("nf4", DOWN + "weight.quant_map", put(0.5), [DOWN + "weight.quant_map", "nf4"]),
    ("nf4", DOWN + "weight.nested_absmax", fewer, [DOWN + "weight.nested_absmax", "1 scales", "320"]),
    ("nf4", DOWN + "weight.nested_absmax", put(NAN, 0), [DOWN + "weight.nested_absmax", "not finite"]),
    ("nf4", DOWN + "weight.nested_quant_map", fewer, [DOWN + "weight.nested_quant_map", "[255]", "[256]"]),
    ("nf4", DOWN + "weight.quant_state.bitsandbytes__nf4", None, [DOWN + "weight.quant_state", "missing"]),
    ("nf4", DOWN + "weight.quant_state.bitsandbytes__nf4", put(0), [DOWN + "weight.quant_state", "describe"]),
    (
        "nf4",
        DOWN + "weight.quant_state.bitsandbytes__nf4",
        text(lambda state: state.update(shape=[160, 64])),
        [DOWN + "weight.quant_state", "[160, 64]"],
    ),
    (
        "nf4",
        DOWN + "weight.quant_state.bitsandbytes__nf4",
        text(lambda state: state.update(blocksize=0)),
        [DOWN + "weight.quant_state", "blocks of 0"],
    ),
    (
        "nf4",
        DOWN + "weight.quant_state.bitsandbytes__nf4",
        text(lambda state: state.update(nested_blocksize=-1)),
        [DOWN + "weight.nested_absmax"],
    ),
    (
        "nf4",
        DOWN + "weight.quant_state.bitsandbytes__nf4",
        text(lambda state: state.update(nested_offset=1e400)),
        [DOWN],
    ),
]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(checkpoints(kind), tmp_path / kind))


def is_one_sentence(error: pytest.ExceptionInfo[CheckpointError], folder: Path, words: list[str]) -> None:
    message = str(error.value)
    assert all(word in message for word in [*words, str(folder)]), message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "tensor", "change", "words"), LIES)
def test_impossible_tensor_is_named(
    copy: Callable[[str], Path], name: str, tensor: str, change: Change | None, words: list[str]
) -> None:
    folder = rewrite(copy("llama"), FORMATS[name])
    state: State = load_file(folder / "model.safetensors")
    found = state.pop(tensor)
    save(folder, state if change is None else {**state, tensor: change(found)})
    with pytest.raises(CheckpointError) as caught:
        decoder_of(folder)
    is_one_sentence(caught, folder, words)


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_file_is_named(copy: Callable[[str], Path], name: str) -> None:
    folder = rewrite(copy("llama"), FORMATS[name])
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size * 2 // 3)
    with pytest.raises(CheckpointError) as caught:
        decoder_of(folder)
    is_one_sentence(caught, folder, ["model.safetensors"])


@pytest.mark.parametrize("flag", ["int8", "int4", "int4-g32", "fp8"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_weight_that_is_not_finite_is_not_quantized(copy: Callable[[str], Path], flag: str, value: float) -> None:
    folder = copy("llama")
    state = load_file(folder / "model.safetensors")
    save(folder, {name: put(value)(tensor) if name == GATE + "weight" else tensor for name, tensor in state.items()})
    spec = spec_from_config(read_config(folder))
    with pytest.raises(CheckpointError) as caught:
        load(folder, spec, torch.float32, CPU, invariant=False, memory=in_memory(spec.stored, flag, CPU))
    is_one_sentence(caught, folder, [GATE + "weight", "not finite"])


def changed(name: str, **settings: Any) -> dict[str, Any]:
    return FORMATS[name].config | settings


BITS = {"num_bits": 4, "type": "int", "strategy": "channel"}
TRANSFORM = {"type": "hadamard", "apply": [{"location": at} for at in ("weight_output", "q_attn", "input")]}
SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    (changed("gptq", bits=2), ["gptq", "2 bits", "4, 8"]),
    (changed("gptq", bits=3), ["gptq", "3 bits", "4, 8"]),
    (changed("gptq", bits="4"), ["gptq", "4, 8"]),
    (changed("gptq", group_size=0), ["gptq", "group_size 0"]),
    (changed("gptq", group_size=-128), ["gptq", "group_size -128"]),
    (changed("gptq", group_size=40), ["gptq", "group_size 40", "16"]),
    (changed("gptq", checkpoint_format="marlin"), ["gptq", "'marlin'", "gptq_v2"]),
    (changed("gptq", dynamic={"+:.*down": {"bits": 3}}), ["gptq", "3 bits"]),
    (changed("gptq", dynamic={"+:*": {"bits": 8}}), ["gptq", "'*'"]),
    (changed("awq", version="gemv"), ["awq", "'gemv'", "gemm"]),
    (changed("awq", bits=8), ["awq", "8 bits", "4"]),
    (compressed(bits=4, size=32).config | {"config_groups": {"x": {"weights": BITS, "targets": ["re:("]}}}, ["'('"]),
    (changed("awq", group_size=0), ["awq", "group_size 0"]),
    (changed("nvfp4, modelopt", quant_algo="NVFP4_AWQ"), ["modelopt", "'NVFP4_AWQ'", "W4A16_NVFP4"]),
    (changed("nvfp4, modelopt", quant_algo=None), ["modelopt", "quant_algo None"]),
    (changed("nvfp4, modelopt", group_size=32), ["modelopt", "group_size 32", "16"]),
    (changed("nvfp4, modelopt", quant_algo="MIXED_PRECISION"), ["modelopt", "no quantized_layers"]),
    (
        changed("nvfp4, modelopt", quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}}),
        ["modelopt", "'W4A8_AWQ'"],
    ),
    (changed("auto-round, gptq", bits=2), ["gptq", "2 bits", "4, 8"]),
    (changed("auto-round, gptq", packing_format="auto_round:fake"), ["auto-round", "'auto_round:fake'", "auto_awq"]),
    (changed("auto-round, mxfp4", bits=6), ["auto-round", "'mx_fp'", "bits 6"]),
    (changed("auto-round, gptq", bits=16), ["auto-round", "bits 16"]),
    (changed("auto-round, gptq", rotation_config={"hadamard_type": "random"}), ["auto-round", "rotation_config"]),
    (changed("auto-round, gptq", extra_config={"model.layers.1.mlp.up_proj": {"bits": 3}}), ["gptq", "3 bits"]),
    (changed("auto-round, gptq", extra_config={"*.mlp": {"bits": 8}}), ["auto-round", "'*.mlp'"]),
    (changed("nf4", load_in_4bit=False, load_in_8bit=True), ["bitsandbytes", "8 bits", "nf4"]),
    (changed("nf4", bnb_4bit_quant_type="af4"), ["bitsandbytes", "'af4'", "nf4"]),
    (changed("int4 a group", transform_config={"config_groups": {"R": TRANSFORM}}), ["transforms at input, q_attn"]),
    (changed("int4 a group", transform_config={"config_groups": {"R": {}}}), ["wrong type"]),
    (changed("gptq", meta={"rotation": "hadamard"}), ["gptq", "'hadamard'"]),
    (changed("gptq", bits=[4]), ["gptq", "wrong type"]),
    (changed("gptq", dynamic=["x"]), ["gptq", "wrong type"]),
    ({"quant_method": "compressed-tensors", "config_groups": {"x": 3}}, ["compressed-tensors", "wrong type"]),
    ({"quant_method": ["gptq"]}, ["['gptq']", "awq"]),
    (eight_bits("int", "group", "pack-quantized", num_bits=3, group_size=128), ["3-bit int", "4- and 8"]),
    (eight_bits("float", "channel", "float-quantized", symmetric=False), ["asymmetric"]),
    (eight_bits("float", "channel", "marlin-24"), ["'marlin-24'", "float-quantized"]),
    (eight_bits("float", "token", "float-quantized"), ["'token'", "channel"]),
    (eight_bits("int", "group", "pack-quantized"), ["[1, None]"]),
    (eight_bits("int", "group", "pack-quantized", group_size=40), ["40", "multiple of 16"]),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, ["config_groups"]),
    ({"quant_method": "fp8", "fmt": "e5m2"}, ["'e5m2'", "e4m3"]),
    ({"quant_method": "fp8", "weight_block_size": 128}, ["128"]),
    ({"load_in_8bit": True}, ["quant_method None"]),
    ({"quant_method": "gguf", "kind": "Q4_0", "tiled_heads": [1]}, ["gguf", "wrong type"]),
    ({"quant_method": "aqlm"}, ["'aqlm'", "gptq", "awq", "mxfp4", "bitsandbytes"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_unsupported_settings_are_named(checkpoints: Checkpoints, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(read_config(checkpoints("llama")) | {"quantization_config": settings})
    assert all(word in str(caught.value) for word in words), caught.value


def test_every_format_has_a_lie() -> None:
    assert {FORMATS[name].config["quant_method"] for name, *_ in LIES} == {
        form.config["quant_method"] for form in FORMATS.values()
    }
    assert is_linear(GATE + "weight") and is_linear(DOWN + "weight")
