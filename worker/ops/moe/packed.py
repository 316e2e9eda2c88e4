"""The feed-forward network of a mixture of experts: for each row, a router chooses a few experts, which compute it.

The result of a row is the weighted sum of its experts' results, added from the most to the least likely expert. So it
depends on this row only, and not on other rows that chose the same experts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from worker.ops import native as c_library
from worker.ops.linear.native import Coded
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import PackedCodes, pack_with_wide_scales, unpack_codes, with_narrow_scales
from worker.ops.moe.native import CExperts, CpuExperts, pack_experts_in_c
from worker.ops.quantized_weight import QuantizedWeight, dequantize, stack
from worker.spec import ACTIVATIONS, Activation, ExpertGroups

# Packs the weights of many experts, of four or eight bits, for GPU kernels, as one PackedCodes with the rows of all
# experts.
#
# The rows of each expert are padded to whole tiles, so that expert e begins at row e * padded_rows.


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """The weights [N, K] of one linear of `count` experts."""

    packed: PackedCodes  # [count * padded_rows, K]
    count: int
    rows: int  # N

    @property
    def padded_rows(self) -> int:
        """How many rows an expert has, padded to whole tiles."""
        return self.packed.padded_rows // self.count

    def expert(self, number: int) -> PackedCodes:
        """Returns the weight [N, K] of one expert, without a copy."""
        packed, tiles = self.packed, len(self.packed.codes) // self.count
        rows = slice(number * self.padded_rows, (number + 1) * self.padded_rows)
        return replace(
            packed,
            shape=(self.rows, packed.shape[1]),
            codes=packed.codes[number * tiles : (number + 1) * tiles],
            scale=packed.scale[:, rows],
            minimum=None if packed.minimum is None else packed.minimum[:, rows],
        )


def pack_experts_on_gpu(
    experts: Iterable[Sequence[Tensor | Coded]], count: int, dtype: torch.dtype
) -> tuple[Tensor, ExpertCodes | None]:
    """Packs one linear of `count` experts on their device. The parts of an expert's weight are stacked.

    If all experts are quantized in the same format and have no input order, returns an empty tensor and the codes.
    Otherwise, returns the weights [count, N, K] in `dtype`, and None. Experts are read from the iterable one by one,
    so that only one expert is in memory twice.
    """
    codes: ExpertCodes | None = None
    plain: Tensor | None = None
    for number, parts in enumerate(experts):
        one = None if plain is not None else _one_weight(parts)
        wide = None if one is None else pack_with_wide_scales(one)
        if wide is not None and codes is None and number == 0:
            codes = _empty(wide, count)
        if wide is not None and codes is not None and _fits(wide, codes):
            _put(wide, codes, number)
            continue
        full = torch.cat([part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts])
        if plain is None:
            plain = full.new_empty(count, *full.shape)
            for before in range(number):
                assert codes is not None
                plain[before] = unpack_codes(codes.expert(before)).dequantize(dtype)
            codes = None
        plain[number] = full
    if plain is not None:
        return plain, None
    assert codes is not None
    packed = with_narrow_scales(codes.packed)
    return torch.empty(0, dtype=dtype, device=packed.codes.device), replace(codes, packed=packed)


def _one_weight(parts: Sequence[Tensor | Coded]) -> QuantizedWeight | None:
    """Returns the parts as one weight; None if they have several formats or an input order."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts) or len(stacked := stack(quantized)) > 1 or stacked[0].input_order is not None:
        return None
    return stacked[0]


def _empty(first: PackedCodes, count: int) -> ExpertCodes:
    """Allocates memory for `count` weights of the same shape and format as the first one."""

    def wide(scale: Tensor) -> Tensor:
        return scale.new_empty(len(scale), count * scale.shape[1])

    packed = replace(
        first,
        shape=(count * first.padded_rows, first.shape[1]),
        codes=first.codes.new_empty(count * len(first.codes), *first.codes.shape[1:]),
        scale=wide(first.scale),
        minimum=None if first.minimum is None else wide(first.minimum),
    )
    return ExpertCodes(packed, count, first.shape[0])


def _fits(one: PackedCodes, codes: ExpertCodes) -> bool:
    place = codes.expert(0)
    return (one.shape, one.format) == (place.shape, place.format)


def _put(one: PackedCodes, codes: ExpertCodes, number: int) -> None:
    place = codes.expert(number)
    place.codes.copy_(one.codes)
    place.scale.copy_(one.scale)
    if place.minimum is not None and one.minimum is not None:
        place.minimum.copy_(one.minimum)


Item = TypeVar("Item")
Gather = Callable[[Tensor], Tensor]  # [T, own columns] → [T, columns of all ranks]
LEAST_SUM = 1e-20  # added to the sum of a row's sigmoids, which may all be zero; csrc/experts.c has the same constant
CLEAR = 1e-3  # if logits differ by more than this fraction of the largest one, rounding does not change their order


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One linear of all experts of a layer (gate_up or down), prepared for the operation `experts`."""

    weight: Tensor  # [E, N, K]; empty if `cpu` or `codes` hold the weights; int8 or float8_e4m3fn if there is a `scale`
    bias: Tensor | None  # [E, N]
    cpu: CpuExperts | None = None  # weights and biases, packed for the C library
    scale: Tensor | None = None  # [E, N] float32
    dynamic: bool = False  # if true, rows of the input are quantized to the weights' format
    codes: ExpertCodes | None = None  # weights quantized in groups, on a GPU

    @property
    def nbytes(self) -> int:
        held = sum(x.nbytes for x in (self.weight, self.bias, self.scale) if x is not None)
        held += 0 if self.codes is None else self.codes.packed.nbytes()
        return held + (0 if self.cpu is None else self.cpu.nbytes)

    @property
    def format(self) -> tuple[object, ...]:
        """The formats for which a GPU kernel must be compiled. Kernels are compiled for the sizes, too."""
        return self.weight.dtype, self.dynamic, None if self.codes is None else self.codes.packed.format

    def expert(self, number: int) -> PackedLinear:
        """Returns the linear of one expert, for weights on a GPU. Copies no memory."""
        bias, scale = (None if x is None else x[number] for x in (self.bias, self.scale))
        if self.codes is not None:
            return PackedLinear(self.weight, bias, True, codes=(self.codes.expert(number),))
        return PackedLinear(self.weight[number], bias, True, scale=scale, dynamic=self.dynamic)


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a layer's experts. E: the number of experts; H: hidden size; I: intermediate size."""

    router: PackedLinear  # H → E
    gate_up: PackedExperts  # H → 2 I: gate, then up; H → I without a gate
    down: PackedExperts  # I → H
    loads: Tensor | None = None  # [E] int64: counts the rows that choose each expert
    scales: Tensor | None = None  # [E] float32: factors of the routing weights
    choice_bias: Tensor | None = None  # [E] float32: added to the scores when experts are chosen, not to the weights


def packed_in_c(packed: CpuExperts) -> PackedExperts:
    return PackedExperts(torch.empty(0, dtype=packed.dtype), None, packed)


def in_c(
    layer: Experts, chosen: int, activation: Activation, *, normalized: bool, sigmoid: bool = False,
    groups: ExpertGroups | None = None,
) -> CExperts | None:  # fmt: skip
    """Returns the experts for the C library; None if not all their weights are packed for it.

    The other arguments are those of `experts`.
    """
    if layer.router.cpu is None or layer.gate_up.cpu is None or layer.down.cpu is None:
        return None
    return CExperts(
        router=layer.router.cpu, gate_up=layer.gate_up.cpu, down=layer.down.cpu, scales=layer.scales,
        choice_bias=layer.choice_bias, loads=layer.loads, chosen=chosen, sigmoid=sigmoid, normalized=normalized,
        activation=ACTIVATIONS.index(activation), groups=groups,
    )  # fmt: skip


def pack_experts(
    experts: Iterable[Sequence[Tensor | Coded]],
    bias: Tensor | None = None,
    *,
    count: int,
    dtype: torch.dtype,
    invariant: bool,
    int8_inputs: bool = False,
) -> PackedExperts:
    """Prepares one linear of `count` experts for inputs of `dtype`.

    experts: for each expert the parts of its weight, whose rows are stacked as in pack_stacked of
    worker/ops/linear/packed.py. Experts
        are read from the iterable one by one, so that only one expert is in memory twice.
    bias: [E, N]
    int8_inputs: as for pack_weight of worker/ops/linear/native.py
    """
    first, every = _peek(experts)
    if first[0].is_cuda:
        weight, codes = pack_experts_on_gpu(every, count, dtype)
        return PackedExperts(weight, bias, codes=codes)
    if c_library.available(dtype) and not any(part.is_cuda for part in first):
        return packed_in_c(pack_experts_in_c(every, bias, count=count, dtype=dtype, int8_inputs=int8_inputs))
    packed: Tensor | None = None
    for number, parts in enumerate(every):
        plain = torch.cat([part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts])
        if packed is None:
            packed = plain.new_empty(count, *plain.shape)
        packed[number] = plain
    assert packed is not None
    return PackedExperts(packed, bias)


def pack_quantized_experts(
    experts: Iterable[tuple[Tensor, Tensor]],
    bias: Tensor | None = None,
    *,
    count: int,
    dtype: torch.dtype,
    invariant: bool,
    dynamic: bool = False,
) -> PackedExperts:
    """Prepares one linear of `count` experts.

    experts: for each expert values [N, K] (int8 or float8_e4m3fn) and scale [N]
    dynamic: if true, inputs are quantized, too. Only GPU kernels read quantized values; see pack_quantized in
        worker/ops/linear/packed.py.
    """
    (first, _), every = _peek(experts)
    if not first.is_cuda:
        parts = ([dequantize(values, scale, dtype)] for values, scale in every)
        return pack_experts(parts, bias, count=count, dtype=dtype, invariant=invariant)
    weight, scales = first.new_empty(count, *first.shape), torch.empty(count, len(first), device=first.device)
    for number, (values, scale) in enumerate(every):
        weight[number], scales[number] = values, scale
    return PackedExperts(weight, bias, scale=scales, dynamic=dynamic)


def _peek(items: Iterable[Item]) -> tuple[Item, Iterable[Item]]:
    """Returns the first item, and an iterator over all items, the first included."""
    rest = iter(items)
    first = next(rest)
    return first, chain((first,), rest)
