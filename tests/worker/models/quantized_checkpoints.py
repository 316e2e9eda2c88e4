"""Writes quantized checkpoints by the specifications of their formats, independently of the code that reads them.

The library `compressed-tensors` writes its own files. A `Format` quantizes a weight, and returns the tensors that a
file has for it, and the dequantized weight.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]
Config = dict[str, Any]
E4M3 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6961928010, -0.5250730515, -0.3949174881, -0.2844413817, -0.1847734302, -0.0910500363, 0.0,
       0.0795802996, 0.1609302014, 0.2461123019, 0.3379152417, 0.4407098293, 0.5626170039, 0.7229568362,
       1.0)  # fmt: skip
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4, -0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -1 / 2, -1 / 6,
       -1 / 4)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """quantize: returns for a weight [N, K] its tensors by the ends of their names, and the dequantized weight"""

    config: Config
    quantize: Callable[[Tensor], tuple[State, Tensor]]


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def with_head(name: str) -> bool:
    return is_linear(name) or name == "lm_head.weight"


def rewrite(folder: Path, form: Format, *, widened: bool = False, which: Callable[[str], bool] = is_linear) -> Path:
    """Quantizes the weights of a checkpoint that `which` names.

    widened: writes the dequantized weights in float32 instead
    """
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if which(name)]:
        tensors, weight = form.quantize(state.pop(name).float())
        module = name.removesuffix("weight")
        state |= {name: weight} if widened else {module + kind: tensor for kind, tensor in tensors.items()}
    save(folder, state)
    if not widened:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": form.config}))
    return folder


def save(folder: Path, state: State) -> None:
    """Saves tensors. Each is cloned, because safetensors refuses tensors that share memory."""
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def affine(
    weight: Tensor, bits: int, index: Tensor, *, symmetric: bool, stored: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes [N, K], scales and zero points [N, groups]. index [K]: the group of each input"""
    most, groups = 2**bits - 1, int(index.max()) + 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = (torch.empty(len(weight), groups) for _ in range(2))
    for group in range(groups):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).to(stored).float()
        zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round().clamp(0, most)
        codes[:, index == group] = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, most).long()
        scales[:, group], zeros[:, group] = scale, zero
    return codes, scales, zeros.long()


def widen(codes: Tensor, scales: Tensor, zeros: Tensor, index: Tensor) -> Tensor:
    return scales[:, index] * (codes - zeros[:, index])


def words(numbers: Tensor, bits: int) -> Tensor:
    """Packs numbers [R, C] along the columns into int32, lowest bits first."""
    count = 32 // bits
    packed = torch.zeros(len(numbers), -(-numbers.shape[1] // count), dtype=torch.int64)
    for column in range(numbers.shape[1]):
        packed[:, column // count] |= numbers[:, column] << (bits * (column % count))
    return packed.to(torch.int32)


def groups_of(weight: Tensor, size: int, *, shuffled: bool = False) -> Tensor:
    """Returns the group of each input. shuffled: in a random order that depends on the weight, as with act-order"""
    columns = weight.shape[1]
    index = torch.arange(columns) // (size if size > 0 else columns)
    return index[torch.randperm(columns, generator=own_generator(weight))] if shuffled else index


def own_generator(weight: Tensor) -> torch.Generator:
    """Returns a generator whose seed is a checksum of the weight."""
    return torch.Generator().manual_seed(zlib.crc32(weight.contiguous().numpy().tobytes()))


def gptq(
    bits: int = 4, group_size: int = 32, *, symmetric: bool = True, act_order: bool = False, version: int = 1
) -> Format:
    """The format of AutoGPTQ and GPTQModel."""

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        index = groups_of(weight, group_size, shuffled=act_order)
        codes, scales, zeros = affine(weight, bits, index, symmetric=symmetric)
        ones = 0x11111111 if bits == 4 else 0x01010101
        tensors = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zeros.T, bits) - (ones if version == 1 else 0),
            "scales": scales.T.half(),
            "g_idx": index.to(torch.int32),
        }
        return tensors, widen(codes, scales, zeros, index)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric,
        "lm_head": False, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version],
    }  # fmt: skip
    return Format(config, quantize)


def awq(group_size: int = 32, *, zero_point: bool = True) -> Format:
    """The format of AutoAWQ."""

    def packed(numbers: Tensor) -> Tensor:
        columns = torch.arange(numbers.shape[1]).reshape(-1, 8)[:, AWQ_ORDER].flatten()
        return words(numbers[:, columns], 4)

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        index = groups_of(weight, group_size)
        codes, scales, zeros = affine(weight, 4, index, symmetric=not zero_point)
        tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.half()}
        return tensors, widen(codes, scales, zeros, index)

    return Format(
        {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": zero_point, "version": "gemm",
         "modules_to_not_convert": None}, quantize,
    )  # fmt: skip


def compressed(
    format: str = "pack-quantized",
    *,
    type: str = "int",
    bits: int = 4,
    strategy: str = "group",
    size: int | None = None,
    symmetric: bool = True,
) -> Format:
    """The format of the library `compressed-tensors`. size: group size"""
    weights = {"num_bits": bits, "type": type, "strategy": strategy, "symmetric": symmetric, "dynamic": False}
    weights |= {"group_size": size} if size else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.load_from_registry(format)

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        scale, zero = _parameters(weight, scheme)
        tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(tensors, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"].float()

    config = {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip
    return Format(config, quantize)


def _parameters(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """Returns scales and zero points that cover a weight's smallest and largest numbers."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    size = {"tensor": weight.numel(), "channel": weight.shape[1]}.get(args.strategy, args.group_size)
    parts = weight.reshape(1, -1, size) if args.strategy == "tensor" else weight.unflatten(1, (-1, size))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    return (scale.reshape(1), zero.reshape(1)) if args.strategy == "tensor" else (scale, zero)


def ordered(bits: int = 4, size: int = 32, *, symmetric: bool = True) -> Format:
    """`pack-quantized` with reordered inputs and `weight_g_idx`, as the library wrote it until version 0.12."""

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        index = groups_of(weight, size, shuffled=True)
        codes, scales, zeros = affine(weight, bits, index, symmetric=symmetric)
        tensors = {
            "weight_packed": words(codes, bits), "weight_scale": scales, "weight_g_idx": index.to(torch.int32),
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        tensors |= {} if symmetric else {"weight_zero_point": words(zeros.T, bits).T}
        return tensors, widen(codes, scales, zeros, index)

    config = compressed(bits=bits, size=size, symmetric=symmetric).config
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return Format(config, quantize)


def mxfp4() -> Format:
    """The format of gpt-oss."""

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        groups = weight.unflatten(1, (-1, 32))
        exponent = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-126, 127)
        scaled = groups / exponent.exp2()[..., None]
        codes = (scaled[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        tensors = {"weight_blocks": blocks.to(torch.uint8), "weight_scales": (exponent + 127).to(torch.uint8)}
        return tensors, (torch.tensor(E2M1)[codes] * exponent.exp2()[..., None]).flatten(1)

    return Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, quantize)


def nvfp4(layout: str = "compressed-tensors") -> Format:
    """NVFP4 as compressed-tensors, modelopt or AutoRound write it. The number of a whole weight is drawn by itself."""
    modelopt = layout == "modelopt"

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        whole = weight.abs().amax() / (6 * 448) * torch.empty(()).uniform_(1, 2, generator=own_generator(weight))
        scale = (groups.abs().amax(-1) / 6 / whole).to(E4M3)
        divisor = (1 / whole).reshape(1)
        numbers = scale.float() * whole if modelopt else scale.float() / divisor
        codes = (groups / numbers[..., None].clamp(min=1e-30))[..., None].sub(torch.tensor(E2M1)).abs().argmin(-1)
        packed = (codes.flatten(1)[:, ::2] | codes.flatten(1)[:, 1::2] << 4).to(torch.uint8)
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.ones(())}
        if not modelopt:
            tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
            tensors |= {"input_global_scale": torch.ones(1)}
        return tensors, (torch.tensor(E2M1)[codes] * numbers[..., None]).flatten(1)

    four = {"num_bits": 4, "type": "float", "group_size": 16}
    inputs = {**four, "strategy": "tensor_group", "symmetric": True, "dynamic": "local"}
    group = {"targets": ["Linear"], "weights": {**inputs, "dynamic": False}, "input_activations": inputs}
    config: Config = {
        "compressed-tensors": {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
        "modelopt": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**four, "dynamic": False}}},
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        "auto-round": {
            "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 16,
            "data_type": "nv_fp", "act_bits": 4, "act_data_type": "nv_fp4_with_static_gs", "sym": True,
        },
    }[layout]  # fmt: skip
    return Format(config, quantize)


def mxfp8(config: Config) -> Format:
    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        groups = weight.unflatten(1, (-1, 32))
        exponent = (groups.abs().amax(-1) / 448).log2().ceil().clamp(-126, 127)
        values = (groups / exponent.exp2()[..., None]).to(E4M3)
        tensors = {"weight": values.flatten(1), "weight_scale": (exponent + 127).to(torch.uint8)}
        return tensors, (values.float() * exponent.exp2()[..., None]).flatten(1)

    return Format(config, quantize)


def auto_round(form: Format, packing_format: str, **more: Any) -> Format:
    """Returns a format with the tensors of another library and AutoRound's config."""
    config = {
        "quant_method": "auto-round", "packing_format": packing_format, "bits": 4, "group_size": 32, "sym": True,
        "data_type": "int", "autoround_version": "0.16.1", "iters": 200, "block_name_to_quantize": "model.layers",
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}, **more,
    }  # fmt: skip
    return Format(config, form.quantize)


def bitsandbytes(kind: str = "nf4", *, nested: bool = True, block: int = 64) -> Format:
    """The format of bitsandbytes. nested: whether scales are quantized, too"""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)
    fine = torch.linspace(-1, 1, 256)  # quantized scales may use any table

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        blocks = weight.reshape(-1, block)
        absmax = blocks.abs().amax(1)
        codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        state: Config = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(weight.shape)}
        tensors = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8), "weight.quant_map": table}
        if nested:
            offset, size = absmax.mean(), 256
            outer = torch.stack([part.abs().amax() for part in (absmax - offset).split(size)])
            spread = outer.repeat_interleave(size)[: len(absmax)]
            small = (((absmax - offset) / spread)[:, None] - fine).abs().argmin(-1)
            absmax = fine[small] * spread + offset.item()
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": fine}
        tensors["weight.absmax"] = small.to(torch.uint8) if nested else absmax
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return tensors, (table[codes] * absmax[:, None]).view(weight.shape)

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    return Format(config, quantize)


MIXTURE = {  # projection → format; projections with the same input differ in format, group size and order
    "q_proj": ordered(),
    "k_proj": ordered(size=16, symmetric=False),
    "v_proj": compressed("int-quantized", bits=8, strategy="channel"),
    "o_proj": compressed(size=32, symmetric=False),
    "gate_proj": ordered(size=16),
    "up_proj": compressed("float-quantized", type="float", bits=8, strategy="channel"),
    "down_proj": compressed("int-quantized", bits=8, strategy="tensor", symmetric=False),
}


def rewrite_as_mixture(folder: Path, *, widened: bool = False) -> Path:
    """Quantizes the projections of a checkpoint as MIXTURE says; see `rewrite`."""
    groups = {
        name: {**form.config["config_groups"]["group_0"], "targets": [f"re:.*{name}$"], "format": form.config["format"]}
        for name, form in MIXTURE.items()
    }
    config = {**MIXTURE["q_proj"].config, "format": "mixed-precision", "config_groups": groups}
    for name, form in MIXTURE.items():
        rewrite(folder, Format(config, form.quantize), widened=widened, which=partial(_is_weight_of, name))
    return folder


def _is_weight_of(module: str, name: str) -> bool:
    return name.endswith(f"{module}.weight")


FORMATS = {
    "gptq": gptq(),
    "gptq, act-order": gptq(act_order=True),
    "gptq, asymmetric": gptq(symmetric=False, group_size=64),
    "gptq v2, asymmetric, act-order": gptq(symmetric=False, act_order=True, version=2),
    "gptq, 8 bits, a row": gptq(8, -1),
    "gptq, 8 bits, asymmetric": gptq(8, 32, symmetric=False, act_order=True),
    "awq": awq(),
    "awq, a row": awq(-1),
    "awq, symmetric": awq(zero_point=False),
    "int4 a group": compressed(size=32),
    "int4 a row": compressed(strategy="channel"),
    "int4 a tensor": compressed(strategy="tensor"),
    "int4 a group, asymmetric": compressed(size=32, symmetric=False),
    "int4 a row, asymmetric": compressed(strategy="channel", symmetric=False),
    "int4 a group, act-order": ordered(),
    "int4 a group, act-order, asymmetric": ordered(symmetric=False),
    "int8 a group, asymmetric": compressed(bits=8, size=32, symmetric=False),
    "int4 a row, a byte each": compressed("int-quantized", strategy="channel"),
    "int8 a tensor, asymmetric": compressed("int-quantized", bits=8, strategy="tensor", symmetric=False),
    "int8 a row": compressed("int-quantized", bits=8, strategy="channel"),
    "int8 a row, asymmetric": compressed("int-quantized", bits=8, strategy="channel", symmetric=False),
    "fp8 a row": compressed("float-quantized", type="float", bits=8, strategy="channel"),
    "mxfp4": mxfp4(),
    "nf4": bitsandbytes(block=32),
    "nf4, plain scales": bitsandbytes(nested=False, block=32),
    "fp4": bitsandbytes("fp4", block=32),
    "mxfp4, compressed-tensors": compressed("mxfp4-pack-quantized", type="float", size=32),
    "mxfp8, compressed-tensors": mxfp8(
        compressed("mxfp8-quantized", type="float", bits=8, size=32).config | {"format": "mxfp8-quantized"}
    ),
    "mxfp8, modelopt": mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}),
    "nvfp4, compressed-tensors": nvfp4(),
    "nvfp4, modelopt": nvfp4("modelopt"),
    "nvfp4, auto-round": nvfp4("auto-round"),
    "auto-round, gptq": auto_round(gptq(symmetric=False), "auto_round:auto_gptq"),
    "auto-round, gptq without an offset": auto_round(gptq(symmetric=False, version=2), "auto_round"),
    "auto-round, awq": auto_round(awq(), "auto_round:auto_awq"),
    "auto-round, mxfp4": auto_round(
        compressed("mxfp4-pack-quantized", type="float", size=32), "auto_round:llm_compressor", data_type="mx_fp"
    ),
}


def blocks(
    config: Config,
    kind: str,
    rows: int,
    columns: int,
    *,
    scale: str = "weight_scale",
    activations: str = "input_scale",
    **how: bool,
) -> Format:
    """Returns a format of eight-bit values with a scale for each block of `rows` x `columns`; 0: all rows or columns.

    activations: the name of a scale of activations, which the reader ignores
    flat: whether the scale of a whole tensor is stored without dimensions
    packed: whether an int32 holds four values
    """

    def quantize(weight: Tensor) -> tuple[State, Tensor]:
        (n, k), high, wide = weight.shape, rows or len(weight), columns or weight.shape[1]
        most = 127.0 if kind == "int8" else 448.0
        parts = [[part.abs().amax() / most for part in row.split(wide, 1)] for row in weight.split(high)]
        grid = torch.tensor(parts)
        spread = grid.repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
        values = (weight / spread).round().to(torch.int8) if kind == "int8" else (weight / spread).to(E4M3)
        tensors = {scale: grid.reshape(()) if how.get("flat") else grid, activations: torch.ones(())}
        if how.get("packed"):
            tensors |= {"weight_packed": words(values.long() + 128, 8), "weight_shape": torch.tensor([n, k])}
        else:
            tensors["weight"] = values
        return tensors, values.float() * spread

    return Format(config, quantize)


def eight_bits(type: str, strategy: str, format: str, **more: Any) -> Config:
    weights = {"num_bits": 8, "type": type, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 32]}
EIGHT_BITS = {
    "int8 a row": blocks(eight_bits("int", "channel", "int-quantized"), "int8", 1, 0),
    "int8 a row, packed": blocks(eight_bits("int", "channel", "pack-quantized"), "int8", 1, 0, packed=True),
    "int8 a group": blocks(eight_bits("int", "group", "pack-quantized", group_size=32), "int8", 1, 32, packed=True),
    "fp8 a row": blocks(eight_bits("float", "channel", "float-quantized"), "fp8", 1, 0),
    "fp8 a tensor": blocks(eight_bits("float", "tensor", "float-quantized"), "fp8", 0, 0),
    "fp8 a tensor, plainly": blocks(FP8, "fp8", 0, 0, flat=True),
    "fp8 a tensor, static": blocks(  # as Ministral 3 is stored
        FP8 | {"weight_block_size": None, "dequantize": False},
        "fp8",
        0,
        0,
        scale="weight_scale_inv",
        activations="activation_scale",
        flat=True,
    ),
    "fp8 a tensor, modelopt": blocks({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 0, 0, flat=True),
    "fp8 a row, modelopt": blocks({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8", 1, 0),
    "fp8 a tensor, auto-round": blocks(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:fp8_static",
            "data_type": "fp8",
            "bits": 8,
            "group_size": -1,
        },
        "fp8",
        0,
        0,
        flat=True,
    ),
    "fp8 a block": blocks(FP8_BLOCKS, "fp8", 48, 32, scale="weight_scale_inv"),
}
