"""Checkpoints with linears of eight bits: what config.json's `quantization_config` says of them, where their values and
scales are, and what they become in memory.

Read are `compressed-tensors` (int8 and fp8, scales for a tensor, a row, a group of columns or a block) and `fp8` (for a
tensor or a block). Weights with a scale for a row, or one for all, stay as they are in memory. Finer scales become
numbers of the weights' dtype, which loses nothing to speak of: a scale a row would need a second rounding to eight
bits. Activations are quantized where a checkpoint wants that dynamically, with a scale for each token; what else it
says of them (scales of its own, or for groups) is left alone, and they keep sixteen bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.config import ConfigError
from worker.kernels.quantize import FORMATS, Kind, Scheme
from worker.model.checkpoint import Checkpoint, CheckpointError
from worker.model.spec import Activations, Stored

# Beside a linear's tensors, or an attention's, and without meaning here. Zero points are: symmetric ones are zero.
IGNORED = (
    ".input_scale", ".output_scale", ".weight_shape", ".weight_zero_point", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
PLAIN = (torch.float32, torch.bfloat16, torch.float16)

Shape = tuple[int, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a checkpoint must hold."""

    name: str
    shape: Shape
    formats: tuple[torch.dtype, ...] = PLAIN  # that it may have
    becomes: Shape = ()  # its shape in a weight in full; (): the same


@dataclass(frozen=True, slots=True)
class Source:
    """One weight [N, K] in a checkpoint: in full, or values and scales."""

    name: str
    shape: Shape
    stored: Stored | None = None
    scale: str = ""
    scale_shape: Shape = ()

    def tensors(self) -> list[Expected]:
        """In the order in which they are read."""
        if self.stored is None:
            return [Expected(self.name, self.shape)]
        values = Expected(self.name, self.held, (self.format,), self.shape)
        return [values, Expected(self.scale, self.scale_shape, becomes=(0,))]

    @property
    def packed(self) -> bool:
        return self.stored is not None and self.stored.packed

    @property
    def held(self) -> Shape:
        """The shape of the values' tensor."""
        return (self.shape[0], -(-self.shape[1] // 4)) if self.packed else self.shape

    @property
    def format(self) -> torch.dtype:
        """The format of the values' tensor, where there are scales."""
        assert self.stored is not None
        return torch.int32 if self.packed else FORMATS[self.stored.kind]


def source_of(name: str, shape: Shape, stored: Stored | None, checkpoint: Checkpoint) -> Source:
    """Where the weight called `name` is: quantized if there are scales beside it."""
    scale = next((name + ending for ending in ("_scale", "_scale_inv") if name + ending in checkpoint), "")
    if stored is None or not scale:
        return Source(name, shape)
    grid, found = stored.grid(shape), checkpoint.shape(scale)
    fits = found == grid or (grid[1] == 1 and found == grid[:1]) or (grid == (1, 1) and found == ())
    return Source(name + "_packed" if stored.packed else name, shape, stored, scale, found if fits else grid)


def joined(values: Sequence[Tensor]) -> Tensor:
    """Values [N, K] of several linears, one below the other; bytes, because not every torch joins float8."""
    return torch.cat([part.view(torch.int8) for part in values]).view(values[0].dtype)


def unpacked(values: Tensor, columns: int) -> Tensor:
    """int32 [N, K / 4], the first of four values + 128 in the lowest byte -> int8 [N, columns]."""
    return (values.view(torch.uint8)[:, :columns] ^ 128).view(torch.int8).contiguous()


def spread(scale: Tensor, source: Source) -> Tensor:
    """The scales of a source, float32: [N] where no row has more than one, or else [N, K]."""
    assert source.stored is not None
    (rows, columns), (down, across) = source.shape, source.stored.block
    if source.stored.by_row:
        return scale.reshape(-1).repeat_interleave(down, 0)[:rows] if down else scale.reshape(1).expand(rows)
    scale = scale.repeat_interleave(across, 1)[:, :columns]
    return scale.repeat_interleave(down, 0)[:rows] if down else scale.expand(rows, columns)


def scheme_in_memory(stored: Stored | None, flag: str) -> Scheme | None:
    """What the linears of a checkpoint become under `--quantization` (None: numbers of the weights' dtype).

    Raises ConfigError when checkpoint and flag want different formats.
    """
    if flag == "none":
        return None
    if flag == "auto":
        return Scheme(stored.kind, stored.activations == "dynamic") if stored is not None and stored.by_row else None
    scheme = Scheme.of(flag)
    if stored is not None and stored.kind != scheme.kind:
        raise ConfigError(f"--quantization {flag} does not fit this checkpoint, which is quantized to {stored.kind}")
    return scheme


def describe(stored: Stored | None, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> str:
    """A sentence for the log; empty where nothing is quantized."""
    held = str(dtype).removeprefix("torch.")
    if stored is None and scheme is None:
        return ""
    origin = f"the checkpoint's linears ({stored})" if stored is not None else "linears"
    if scheme is None:
        return f"{origin} are dequantized to {held}" + _activations(stored, None)
    kept = stored is not None and stored.by_row
    text = f"{origin} are {'kept' if kept else 'quantized'} in {scheme.kind}, one scale a row"
    if device.type == "cuda":
        return text + _activations(stored, scheme)
    return (
        f"{text}, and widened to {held} here: on the CPU they save neither memory nor time"
        f"{_activations(stored, None, asked=scheme.dynamic)}"
    )


def _activations(stored: Stored | None, scheme: Scheme | None, *, asked: bool = False) -> str:
    """How the sentence goes on about activations, where a reader may expect something else."""
    if scheme is not None and scheme.dynamic:
        return "; so are their inputs, one scale a token"
    wanted = asked or (stored is not None and stored.activations != "in full")
    return "; activations, which would be quantized, too, stay as they are" if wanted else ""


def read(config: Config) -> Stored | None:
    """What config.json says, None where it speaks of no quantization.

    Raises CheckpointError, naming `quant_method`, for what is not supported.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method")
    reader = METHODS.get(method)
    if reader is None:
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} is not supported; supported are {', '.join(METHODS)}"
        )
    return reader(given)


def _fp8(given: Config) -> Stored:
    if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quant_method 'fp8': fmt {given['fmt']!r} is not supported; supported is e4m3")
    block = _block(given.get("weight_block_size"), "fp8")
    tokens = given.get("activation_scheme", "dynamic") == "dynamic" and not block[1]
    return Stored("fp8", block, activations="dynamic" if tokens else "otherwise")


def _block(size: Any, method: str) -> tuple[int, int]:
    if size is None:
        return 0, 0
    if isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
        return size[0], size[1]
    raise CheckpointError(f"quant_method {method!r}: {size!r} is not the size of a block of weights")


def _compressed_tensors(given: Config) -> Stored:
    groups = (given.get("config_groups") or {}).values()
    ways = {_group(group, given.get("format")) for group in groups if group.get("weights")}
    if len(ways) != 1:
        raise CheckpointError("quant_method 'compressed-tensors': config_groups must name one scheme for all weights")
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError("quant_method 'compressed-tensors': sparse weights are not supported")
    return ways.pop()


def _group(group: Config, format: str | None) -> Stored:
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
    return Stored(kind, STRATEGIES[strategy](weights), PACKED[format], _inputs(group.get("input_activations"), kind))


def _inputs(given: Config | None, kind: Kind) -> Activations:
    if not given:
        return "in full"
    alike = NUMBERS.get((given.get("type", "int"), given.get("num_bits"))) == kind and given.get("symmetric", True)
    return "dynamic" if alike and given.get("dynamic") is True and given.get("strategy") == "token" else "otherwise"


NUMBERS: Mapping[tuple[str, Any], Kind] = {("int", 8): "int8", ("float", 8): "fp8"}
PACKED = {"int-quantized": False, "float-quantized": False, "naive-quantized": False, "pack-quantized": True}
STRATEGIES: Mapping[Any, Callable[[Config], tuple[int, int]]] = {
    "tensor": lambda weights: (0, 0),
    "channel": lambda weights: (1, 0),
    "group": lambda weights: _block([1, weights.get("group_size")], "compressed-tensors"),
    "block": lambda weights: _block(weights.get("block_structure"), "compressed-tensors"),
}
METHODS: Mapping[Any, Callable[[Config], Stored]] = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
