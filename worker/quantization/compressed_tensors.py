"""Reads checkpoints with `quant_method: compressed-tensors` whose weights have 4 or 8 bits.

Activations are quantized only if the checkpoint asks for dynamic scales per token, in the number format of the weights.
Any other quantization of activations (stored scales, or scales per group) is ignored: activations then keep 16 bits.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import PLAIN, ExpectedTensor, Shape, StoredTensors, StoredWeight
from worker.ops.quantized_weight import E4M3, INT4, INT8, CodeMap
from worker.quantization import mxfp4, nvfp4
from worker.quantization.awq import check_pattern
from worker.quantization.fp8 import Block, ScaledWeight, block_of
from worker.spec import Activations, StoredQuantization

METHOD = "compressed-tensors"
PATTERN = "re:"  # the prefix of targets that are regular expressions
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number format. kind: its name; format: the format of stored tensors that have one code per byte"""

    kind: str
    code_map: CodeMap
    format: str


NUMBERS: Mapping[tuple[Any, Any], Numbers] = {
    ("int", 4): Numbers("int4", INT4, "I8"), ("int", 8): Numbers("int8", INT8, "I8"),
    ("float", 8): Numbers("fp8", E4M3, "F8_E4M3"),
}  # fmt: skip
# format of floats with scales of a format of their own → its name, and how a weight is stored
FLOATS: Mapping[str, tuple[str, Callable[[str, Shape, StoredTensors], StoredWeight]]] = {
    "mxfp4-pack-quantized": ("mxfp4", mxfp4.packed_weight),
    "mxfp8-quantized": ("mxfp8", mxfp4.mxfp8_weight),
    "nvfp4-pack-quantized": ("nvfp4", nvfp4.packed_weight),
}
PACKED = {"int-quantized": False, "float-quantized": False, "naive-quantized": False, "pack-quantized": True}
STRATEGIES: Mapping[Any, Callable[[Config], Block]] = {
    "tensor": lambda weights: Block(0, 0),
    "channel": lambda weights: Block(1, 0),
    "group": lambda weights: block_of([1, weights.get("group_size")], METHOD),
    "block": lambda weights: block_of(weights.get("block_structure"), METHOD),
}


@dataclass(frozen=True, slots=True)
class Group:
    """An entry of config_groups: how the weights of some modules are quantized."""

    targets: tuple[str, ...]
    numbers: Numbers
    packed: bool  # if true, an int32 holds several codes
    block: Block
    symmetric: bool
    ordered: bool  # if true, the inputs were reordered for quantization
    activations: Activations

    @property
    def stored(self) -> StoredQuantization:
        by_row = self.block.by_row and self.symmetric and self.numbers.code_map.bits == 8
        return StoredQuantization(self.numbers.kind, str(self.block), by_row, self.activations)

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> ScaledWeight:
        grid, bits = self.block.grid(shape), self.numbers.code_map.bits if self.packed else 0
        code_map = INT8 if self.numbers.code_map is INT4 and not self.packed else self.numbers.code_map
        values = ExpectedTensor(name, shape, (self.numbers.format,))
        zero = self._grid(name + "_zero_point", shape, tensors, ("I8",))
        if self.packed:
            values = ExpectedTensor(name + "_packed", (shape[0], _words(shape[1], bits)), ("I32",))
            if self.block.rows == 1:
                zero = ExpectedTensor(name + "_zero_point", (_words(grid[0], bits), grid[1]), ("I32",))
        g_idx = name + "_g_idx"
        return ScaledWeight(
            name, shape, tensors, self.block, code_map, bits, values,
            self._grid(name + "_scale", shape, tensors, PLAIN),
            None if self.symmetric else zero,
            ExpectedTensor(g_idx, (shape[1],), ("I32",)) if self.ordered or g_idx in tensors else None,
            self.ordered,
        )  # fmt: skip

    def _grid(self, name: str, shape: Shape, tensors: StoredTensors, formats: tuple[str, ...]) -> ExpectedTensor:
        """Returns the expected tensor `name`, which has a number for each block."""
        actual = tensors.shape(name) if name in tensors else ()
        return ExpectedTensor(name, self.block.grid_shape(shape, actual), formats)


@dataclass(frozen=True, slots=True)
class FloatGroup:
    """An entry of config_groups whose weights are in one of FLOATS. kind: its name; make: how a weight is stored"""

    targets: tuple[str, ...]
    kind: str
    make: Callable[[str, Shape, StoredTensors], StoredWeight]
    activations: Activations

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization(self.kind, activations=self.activations)

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight:
        return self.make(name, shape, tensors)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The settings of a compressed-tensors checkpoint. A linear is quantized if the checkpoint has its scales."""

    groups: tuple[Group | FloatGroup, ...]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of names of tensors that are not read. Zero points are read only for asymmetric weights: all others
        are 0.
        """
        return ".weight_shape", ".weight_zero_point"

    @property
    def stored(self) -> StoredQuantization:
        return StoredQuantization.of_all([group.stored for group in self.groups])

    def weight(self, name: str, shape: Shape, tensors: StoredTensors) -> StoredWeight | None:
        if name + "_scale" not in tensors:
            return None
        return self._group(name.removesuffix(".weight")).weight(name, shape, tensors)

    def _group(self, module: str) -> Group | FloatGroup:
        """Returns a module's group: a group that targets its name, else a pattern of its name, else its class."""
        for matches in (_is_name, _is_pattern, _is_class):
            for group in self.groups:
                if any(matches(target, module) for target in group.targets):
                    return group
        return self.groups[0]


def _is_name(target: str, module: str) -> bool:
    return target == module


def _has_pattern(target: str) -> bool:
    return target.startswith(PATTERN)


def _is_pattern(target: str, module: str) -> bool:
    return _has_pattern(target) and re.match(target.removeprefix(PATTERN), module) is not None


def _is_class(target: str, module: str) -> bool:
    return target == ("Embedding" if module.endswith("embed_tokens") else "Linear")


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def read(settings: Config) -> CompressedTensors:
    """Reads a quantization_config. Raises CheckpointError when a setting is not supported."""
    groups = (settings.get("config_groups") or {}).values()
    found = tuple(_group(group, settings.get("format")) for group in groups if group.get("weights"))
    if not found:
        raise CheckpointError(f"quant_method {METHOD!r}: config_groups names no scheme for weights")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError(f"quant_method {METHOD!r}: sparse weights are not supported")
    _check_transforms((settings.get("transform_config") or {}).get("config_groups") or {})
    return CompressedTensors(found)


def _check_transforms(groups: Config) -> None:
    """Raises CheckpointError if activations must be rotated at run time. Stored weights are rotated already."""
    places = {step["location"] for group in groups.values() for step in group["apply"]}
    if online := sorted(places - {"weight_input", "weight_output"}):
        raise CheckpointError(f"quant_method {METHOD!r}: transforms at {', '.join(online)} are not supported")


def _group(group: Config, format: str | None) -> Group | FloatGroup:
    weights, format = group["weights"], str(group.get("format") or format)
    targets = tuple(group.get("targets") or ())
    for pattern in filter(_has_pattern, targets):
        check_pattern(pattern.removeprefix(PATTERN), METHOD)
    if format in FLOATS:
        kind, make = FLOATS[format]
        return FloatGroup(targets, kind, make, _inputs(group.get("input_activations"), kind))
    type, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    numbers, symmetric = NUMBERS.get((type, bits)), weights.get("symmetric", True)
    fits = numbers is not None and format in PACKED and (type == "int" or (symmetric and not PACKED[format]))
    if numbers is None or not fits or strategy not in STRATEGIES:
        raise CheckpointError(
            f"quant_method {METHOD!r}: {'' if symmetric else 'asymmetric '}{bits}-bit {type} weights by {strategy!r} "
            f"in format {format!r} are not supported; supported are 4- and 8-bit int and symmetric 8-bit float ones by "
            f"{', '.join(STRATEGIES)} in format {', '.join(PACKED)}, and format {', '.join(FLOATS)}"
        )
    inputs, ordered = _inputs(group.get("input_activations"), numbers.kind), weights.get("actorder") in (True, "group")
    return Group(targets, numbers, PACKED[format], STRATEGIES[strategy](weights), symmetric, ordered, inputs)


def _inputs(settings: Config | None, kind: str) -> Activations:
    if not settings:
        return "unquantized"
    numbers = NUMBERS.get((settings.get("type", "int"), settings.get("num_bits")))
    alike = numbers is not None and numbers.kind == kind and settings.get("symmetric", True)
    return "dynamic" if alike and settings.get("dynamic") is True and settings.get("strategy") == "token" else "other"
