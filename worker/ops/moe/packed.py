"""The feed-forward network of a mixture of experts: for each row, a router chooses a few experts, which compute it.

The result of a row is the weighted sum of its experts' results, added from the most to the least likely expert. So it
depends on this row only, and not on other rows that chose the same experts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from worker.ops import native as c_library
from worker.ops.linear.native import Coded
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.native import CExperts, CpuExperts, pack_experts_in_c
from worker.ops.moe.packed_codes import ExpertCodes, pack_experts_on_gpu
from worker.ops.quantized_weight import dequantize
from worker.spec import ACTIVATIONS, Activation, ExpertGroups

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
