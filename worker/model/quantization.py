"""Reads checkpoints with eight-bit linears: their `quantization_config`, values and scales, and the format in memory.

Supported are `compressed-tensors` (int8 and fp8, scales per tensor, row, group of columns or block) and `fp8` (scales
per tensor or block). Weights with one scale per row or per tensor keep their format in memory. Weights with finer
scales are dequantized to the dtype of the model, which loses nothing of note. Keeping them in eight bits with one scale
per row would round them a second time. Activations are quantized if the checkpoint asks for dynamic scales per token.
Any other quantization of activations (stored scales, or scales per group) is ignored, and they keep sixteen bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.config import ConfigError
from worker.kernels.quantize import FORMATS, Kind, Scheme
from worker.model.checkpoint import Checkpoint, CheckpointError
from worker.model.spec import Activations, StoredQuantization

# Tensors of linears or attention that are not read. Zero points are all zero in symmetric quantization.
IGNORED = (
    ".input_scale", ".output_scale", ".weight_shape", ".weight_zero_point", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
PLAIN = (torch.float32, torch.bfloat16, torch.float16)

Shape = tuple[int, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must hold."""

    name: str
    shape: Shape
    formats: tuple[torch.dtype, ...] = PLAIN  # the formats that it may be stored in
    becomes: Shape = ()  # its shape as part of an unquantized weight; () means `shape`


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Describes how a checkpoint stores one weight [N, K]: as one unquantized tensor, or as values and scales."""

    name: str
    shape: Shape
    stored: StoredQuantization | None = None
    scale: str = ""
    scale_shape: Shape = ()

    def tensors(self) -> list[ExpectedTensor]:
        """Returns the tensors that store the weight, in the order in which they are read."""
        if self.stored is None:
            return [ExpectedTensor(self.name, self.shape)]
        values = ExpectedTensor(self.name, self.values_shape, (self.values_dtype,), self.shape)
        return [values, ExpectedTensor(self.scale, self.scale_shape, becomes=(0,))]

    @property
    def packed(self) -> bool:
        return self.stored is not None and self.stored.packed

    @property
    def values_shape(self) -> Shape:
        """The shape of the tensor of values as stored."""
        return (self.shape[0], -(-self.shape[1] // 4)) if self.packed else self.shape

    @property
    def values_dtype(self) -> torch.dtype:
        """The format of the tensor of values as stored. Only quantized weights have it."""
        assert self.stored is not None
        return torch.int32 if self.packed else FORMATS[self.stored.kind]


def source_of(name: str, shape: Shape, stored: StoredQuantization | None, checkpoint: Checkpoint) -> WeightSource:
    """Returns how the checkpoint stores the weight `name`, which is quantized if the checkpoint has scales for it."""
    scale = next((name + ending for ending in ("_scale", "_scale_inv") if name + ending in checkpoint), "")
    if stored is None or not scale:
        return WeightSource(name, shape)
    grid, actual = stored.grid(shape), checkpoint.shape(scale)
    fits = actual == grid or (grid[1] == 1 and actual == grid[:1]) or (grid == (1, 1) and actual == ())
    return WeightSource(name + "_packed" if stored.packed else name, shape, stored, scale, actual if fits else grid)


def stack_rows(values: Sequence[Tensor]) -> Tensor:
    """Concatenates the values [N, K] of several linears by rows; as bytes, because not every torch can for float8."""
    return torch.cat([part.view(torch.int8) for part in values]).view(values[0].dtype)


def unpack_int32(values: Tensor, columns: int) -> Tensor:
    """Unpacks int32 [N, K / 4] to int8 [N, columns]. Each byte is a value + 128; the lowest byte is the first value."""
    return (values.view(torch.uint8)[:, :columns] ^ 128).view(torch.int8).contiguous()


def expand_scales(scale: Tensor, source: WeightSource) -> Tensor:
    """Expands the stored scales of a weight [N, K] to float32: [N] if each row has one scale, else [N, K]."""
    assert source.stored is not None
    (rows, columns), (down, across) = source.shape, source.stored.block
    if source.stored.by_row:
        return scale.reshape(-1).repeat_interleave(down, 0)[:rows] if down else scale.reshape(1).expand(rows)
    scale = scale.repeat_interleave(across, 1)[:, :columns]
    return scale.repeat_interleave(down, 0)[:rows] if down else scale.expand(rows, columns)


def scheme_in_memory(stored: StoredQuantization | None, flag: str) -> Scheme | None:
    """Returns the quantization of the linears in memory, or None if they have the dtype of the model.

    flag: the value of --quantization. Raises ConfigError when the checkpoint and the flag name different formats.
    """
    if flag == "none":
        return None
    if flag == "auto":
        return Scheme(stored.kind, stored.activations == "dynamic") if stored is not None and stored.by_row else None
    scheme = Scheme.of(flag)
    if stored is not None and stored.kind != scheme.kind:
        raise ConfigError(f"--quantization {flag} does not fit this checkpoint, which is quantized to {stored.kind}")
    return scheme


def describe(stored: StoredQuantization | None, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> str:
    """Returns a sentence for the log about the quantization, or "" if nothing is quantized."""
    plain = str(dtype).removeprefix("torch.")
    if stored is None and scheme is None:
        return ""
    origin = f"the checkpoint's linears ({stored})" if stored is not None else "linears"
    if scheme is None:
        return f"{origin} are dequantized to {plain}" + _activations(stored, None)
    unchanged = stored is not None and stored.by_row
    text = f"{origin} are {'kept' if unchanged else 'quantized'} in {scheme.kind}, one scale per row"
    if device.type == "cuda":
        return text + _activations(stored, scheme)
    return (
        f"{text}, and widened to {plain} here: on the CPU they save neither memory nor time"
        f"{_activations(stored, None, requested=scheme.dynamic)}"
    )


def _activations(stored: StoredQuantization | None, scheme: Scheme | None, *, requested: bool = False) -> str:
    """Returns the part of describe() about activations, or "" if the reader does not expect quantized ones."""
    if scheme is not None and scheme.dynamic:
        return "; so are their inputs, one scale per token"
    expected = requested or (stored is not None and stored.activations != "unquantized")
    return "; activations, which would be quantized as well, are not" if expected else ""


def read(config: Config) -> StoredQuantization | None:
    """Reads how a checkpoint is quantized from its config.json. Returns None if it is not quantized.

    Raises CheckpointError, which names `quant_method`, if the quantization is not supported.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method")
    reader = METHODS.get(method)
    if reader is None:
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} is not supported; supported are {', '.join(METHODS)}"
        )
    return reader(settings)


def _fp8(settings: Config) -> StoredQuantization:
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quant_method 'fp8': fmt {settings['fmt']!r} is not supported; supported is e4m3")
    block = _block(settings.get("weight_block_size"), "fp8")
    tokens = settings.get("activation_scheme", "dynamic") == "dynamic" and not block[1]
    return StoredQuantization("fp8", block, activations="dynamic" if tokens else "other")


def _block(size: Any, method: str) -> tuple[int, int]:
    if size is None:
        return 0, 0
    if isinstance(size, list) and len(size) == 2 and all(isinstance(length, int) and length > 0 for length in size):
        return size[0], size[1]
    raise CheckpointError(f"quant_method {method!r}: {size!r} is not a valid block size of weights")


def _compressed_tensors(settings: Config) -> StoredQuantization:
    groups = (settings.get("config_groups") or {}).values()
    schemes = {_group(group, settings.get("format")) for group in groups if group.get("weights")}
    if len(schemes) != 1:
        raise CheckpointError("quant_method 'compressed-tensors': config_groups must name one scheme for all weights")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError("quant_method 'compressed-tensors': sparse weights are not supported")
    return schemes.pop()


def _group(group: Config, format: str | None) -> StoredQuantization:
    weights, format = group["weights"], str(group.get("format") or format)
    kind = NUMBERS.get((weights.get("type", "int"), weights.get("num_bits")))
    strategy, symmetric = weights.get("strategy"), weights.get("symmetric", True)
    fits = kind is not None and format in PACKED and (kind == "int8" or not PACKED[format])
    if kind is None or not fits or strategy not in STRATEGIES or not symmetric:
        raise CheckpointError(
            f"quant_method 'compressed-tensors': {'' if symmetric else 'asymmetric '}{weights.get('num_bits')}-bit "
            f"{weights.get('type', 'int')} weights by {strategy!r} in format {format!r} are not supported; supported "
            f"are symmetric 8-bit ones by {', '.join(STRATEGIES)} in format {', '.join(PACKED)}"
        )
    return StoredQuantization(
        kind, STRATEGIES[strategy](weights), PACKED[format], _inputs(group.get("input_activations"), kind)
    )


def _inputs(settings: Config | None, kind: Kind) -> Activations:
    if not settings:
        return "unquantized"
    same_kind = NUMBERS.get((settings.get("type", "int"), settings.get("num_bits"))) == kind
    alike = same_kind and settings.get("symmetric", True)
    return "dynamic" if alike and settings.get("dynamic") is True and settings.get("strategy") == "token" else "other"


NUMBERS: Mapping[tuple[str, Any], Kind] = {("int", 8): "int8", ("float", 8): "fp8"}
PACKED = {"int-quantized": False, "float-quantized": False, "naive-quantized": False, "pack-quantized": True}
STRATEGIES: Mapping[Any, Callable[[Config], tuple[int, int]]] = {
    "tensor": lambda weights: (0, 0),
    "channel": lambda weights: (1, 0),
    "group": lambda weights: _block([1, weights.get("group_size")], "compressed-tensors"),
    "block": lambda weights: _block(weights.get("block_structure"), "compressed-tensors"),
}
METHODS: Mapping[Any, Callable[[Config], StoredQuantization]] = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
