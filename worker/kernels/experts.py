"""The feed-forward network of a mixture of experts: for each row, a router chooses a few experts, which compute it.

The result of a row is the weighted sum of its experts' results, added from the most to the least likely expert. So it
depends on this row only, and not on other rows that chose the same experts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels.cpu import bindings, experts_c
from worker.kernels.cpu.experts_c import CExperts
from worker.kernels.cpu.packed_experts import CpuExperts, pack_experts_in_c
from worker.kernels.gpu.experts.packed_experts import ExpertCodes, pack_experts_on_gpu
from worker.kernels.linear import PackedLinear, linear_torch
from worker.kernels.rowwise.act_and_mul import act_and_mul_torch
from worker.kernels.rowwise.activate import ACTIVATIONS, Activation
from worker.kernels.weights.quantize import dequantize
from worker.kernels.weights.quantized_weight import QuantizedWeight

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
    gate_up: PackedExperts  # H → 2 I: gate, then up
    down: PackedExperts  # I → H
    loads: Tensor | None = None  # [E] int64: counts the rows that choose each expert
    scales: Tensor | None = None  # [E] float32: factors of the routing weights
    choice_bias: Tensor | None = None  # [E] float32: added to the sigmoids when experts are chosen, not to the weights


def packed_in_c(packed: CpuExperts) -> PackedExperts:
    return PackedExperts(torch.empty(0, dtype=packed.dtype), None, packed)


def in_c(
    layer: Experts, chosen: int, activation: Activation, *, normalized: bool, sigmoid: bool = False
) -> CExperts | None:
    """Returns the experts for the C library; None if not all their weights are packed for it.

    The other arguments are those of `experts`.
    """
    if layer.router.cpu is None or layer.gate_up.cpu is None or layer.down.cpu is None:
        return None
    return CExperts(
        router=layer.router.cpu, gate_up=layer.gate_up.cpu, down=layer.down.cpu, scales=layer.scales,
        choice_bias=layer.choice_bias, loads=layer.loads, chosen=chosen, sigmoid=sigmoid, normalized=normalized,
        activation=ACTIVATIONS.index(activation),
    )  # fmt: skip


def pack_experts(
    experts: Iterable[Sequence[Tensor | QuantizedWeight]],
    bias: Tensor | None = None,
    *,
    count: int,
    dtype: torch.dtype,
    invariant: bool,
) -> PackedExperts:
    """Prepares one linear of `count` experts for inputs of `dtype`.

    experts: for each expert the parts of its weight, whose rows are stacked as in pack_stacked of linear.py. Experts
        are read from the iterable one by one, so that only one expert is in memory twice.
    bias: [E, N]
    """
    first, every = _peek(experts)
    if first[0].is_cuda:
        weight, codes = pack_experts_on_gpu(every, count, dtype)
        return PackedExperts(weight, bias, codes=codes)
    if bindings.available(dtype) and not any(part.is_cuda for part in first):
        return packed_in_c(pack_experts_in_c(every, bias, count=count, dtype=dtype))
    packed: Tensor | None = None
    for number, parts in enumerate(every):
        plain = torch.cat([part.dequantize(dtype) if isinstance(part, QuantizedWeight) else part for part in parts])
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
        linear.py.
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


def choose_experts(
    logits: Tensor,
    chosen: int,
    *,
    normalized: bool,
    scales: Tensor | None = None,
    sigmoid: bool = False,
    choice_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row, from the most to the least likely, [T, chosen] int64, and their weights.

    logits [T, E] float32: an expert's weight is the softmax of the logits or, with `sigmoid`, the sigmoid of its logit
    normalized: if true, the weights of a row's experts are divided by their sum
    scales [E] float32: factors by which the weights are multiplied in the end
    choice_bias [E] float32, only with `sigmoid`: experts are chosen by weight plus bias instead of by logit

    Equally likely experts are in the order of their numbers.
    """
    order = _choice_keys(logits, choice_bias).sort(dim=1, descending=True, stable=True).indices
    ordered, numbers = logits.gather(1, order), order[:, :chosen]
    if sigmoid:
        weights = ordered[:, :chosen].sigmoid()
        weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM) if normalized else weights
    else:
        weights = (ordered[:, :chosen] if normalized else ordered).softmax(dim=1)[:, :chosen]
    return numbers, weights if scales is None else weights * scales[numbers]


def _choice_keys(logits: Tensor, choice_bias: Tensor | None) -> Tensor:
    """Returns the numbers [T, E] by which experts are chosen. Without a bias, these are the logits, because their
    sigmoids have the same order.
    """
    return logits if choice_bias is None else logits.sigmoid() + choice_bias


def experts(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    gather: Gather | None = None,
    **rows: Tensor | None,
) -> Tensor:
    """Computes the same as experts_torch: in C if all weights are packed for the C library, or in Triton on a GPU.

    gather: as for experts_torch. With it, PyTorch computes on the CPU, because the C library exchanges columns only in
        its own loop over the layers.
    rows: the arguments router_input, add and add_gate of experts_torch
    """
    packed = None if gather else in_c(layer, chosen, activation, normalized=normalized, sigmoid=sigmoid)
    if packed is not None:
        return experts_c.experts(h, packed, **rows)
    if h.is_cuda:
        from worker.kernels.gpu.experts.experts import experts_triton

        return experts_triton(
            h, layer, chosen, activation, normalized=normalized, sigmoid=sigmoid, gather=gather, **rows
        )
    return experts_torch(h, layer, chosen, activation, normalized=normalized, sigmoid=sigmoid, gather=gather, **rows)


def experts_torch(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
    gather: Gather | None = None,
) -> Tensor:
    """Returns the sum over each row's experts of weight * down(act_and_mul(gate_up(h))), plus `add`, in h's dtype.

    h, `add` (the output of the shared expert) and the result are [T, H].
    router_input [T, H]: the input of the router, by default h
    add_gate [T, 1] float32: `add` is multiplied by the sigmoid of add_gate
    gather: given on a rank, which has some rows of each expert's weights. It is called once, with the inputs of `down`
        [T * chosen, I / ranks]. `add` and the result then have only the columns of this rank.

    The router's logits, the weights, the outputs of `down` and the sum are float32.
    """
    logits = _logits(h if router_input is None else router_input, layer.router)
    numbers, weights = choose_experts(
        logits, chosen, normalized=normalized, scales=layer.scales, sigmoid=sigmoid, choice_bias=layer.choice_bias
    )
    if layer.loads is not None:
        layer.loads.add_(numbers.flatten().bincount(minlength=len(layer.loads)))
    places = {expert: (numbers == expert).nonzero(as_tuple=True) for expert in numbers.unique().tolist()}
    inner = torch.cat([
        act_and_mul_torch(_linear(h[rows], layer.gate_up, expert), activation) for expert, (rows, _) in places.items()
    ])  # fmt: skip
    parts = (inner if gather is None else gather(inner)).split([len(rows) for rows, _ in places.values()])
    results = [_linear(part, layer.down, expert, fp32_out=True) for expert, part in zip(places, parts, strict=True)]
    out = torch.empty(*numbers.shape, results[0].shape[1], device=h.device)  # [T, chosen, H]
    for place, result in zip(places.values(), results, strict=True):
        out[place] = result
    return combine_torch(out, weights, add, add_gate, h.dtype)


def combine_torch(
    results: Tensor, weights: Tensor, add: Tensor | None, add_gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns `add` [T, H] times the sigmoid of its gate [T, 1], plus results [T, chosen, H] times weights [T, chosen].

    The sum is computed in float32, in the order of the chosen experts, and rounded once to `dtype`.
    """
    total = results.new_zeros(results.shape[::2]) if add is None else add.float()
    if add_gate is not None:
        total = total * add_gate.sigmoid()
    for slot in range(results.shape[1]):
        total = total + weights[:, slot, None] * results[:, slot]
    return total.to(dtype)


def clear_choices(h: Tensor, layer: Experts, chosen: int) -> Tensor:
    """Returns the rows of h [T, H] whose chosen experts do not depend on how logits are rounded, as [T] bool.

    Only these rows can be compared with the results of another kernel.
    """
    keys = _choice_keys(_logits(h, layer.router), layer.choice_bias)
    if chosen == keys.shape[1]:
        return torch.ones(len(h), dtype=torch.bool, device=h.device)
    last, next_one = keys.topk(chosen + 1, dim=1).values[:, -2:].unbind(1)
    return last - next_one > CLEAR * keys.abs().amax(dim=1)


def _logits(h: Tensor, router: PackedLinear) -> Tensor:
    """Returns the router's logits [T, E] in float32. Library GEMMs would round them to h's dtype."""
    if router.cpu is not None or router.codes or router.scale is not None:
        return linear_torch(h, router, fp32_out=True)
    return F.linear(h.float(), router.weight.float(), None if router.bias is None else router.bias.float())


def _linear(x: Tensor, packed: PackedExperts, expert: int, *, fp32_out: bool = False) -> Tensor:
    if packed.cpu is not None:
        return bindings.linear(x, packed.cpu.weight(expert), out_dtype=torch.float32 if fp32_out else None)
    if packed.codes is not None or packed.scale is not None:
        return linear_torch(x, packed.expert(expert), fp32_out=fp32_out)
    kind = torch.float32 if fp32_out else x.dtype  # the product of float32 copies is not rounded to x's dtype
    bias = None if packed.bias is None else packed.bias[expert].to(kind)
    return F.linear(x.to(kind), packed.weight[expert].to(kind), bias)
