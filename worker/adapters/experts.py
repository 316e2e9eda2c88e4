"""Computes the mixture of experts for rows whose adapter changes experts.

The kernels compute all experts of a step together, and cannot add an adapter's products in between. This module
therefore computes rows with such an adapter expert by expert, and the kernels compute all other rows. Experts are
chosen and summed as in the kernels, and the bits of a row do not depend on other rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.adapters.loaded import Gather, LoadedAdapter, Product
from worker.kernels.cpu import bindings, experts_c
from worker.kernels.experts import Experts, PackedExperts, choose_experts, combine_torch, in_c
from worker.kernels.operations import Operations
from worker.kernels.rowwise.activate import Activation

Rows = tuple[Tensor, LoadedAdapter, float]  # (indices of rows, their adapter, the adapter's scale)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, and the options of the operation (see experts_torch in worker/kernels/experts.py)."""

    layer: Experts
    chosen: int
    activation: Activation
    normalized: bool
    sigmoid: bool


def experts_with_adapters(
    plain: Operations, rows_of: Callable[[Tensor], Sequence[Rows]], gather: Gather | None = None
) -> Callable[..., Tensor]:
    """Returns the operation `experts` of a step.

    rows_of: returns which rows of h [T, H] have which adapter
    gather: see operations_of_rows. With it, the rows without an adapter are computed expert by expert, too, because the
        operation of the kernels gathers nothing.
    """

    def experts(
        h: Tensor,
        layer: Experts,
        chosen: int,
        activation: Activation,
        *,
        normalized: bool,
        sigmoid: bool = False,
        **given: Tensor | None,
    ) -> Tensor:
        how = Mixture(layer, chosen, activation, normalized, sigmoid)
        linears = {id(layer.gate_up), id(layer.down)}
        changed = [one for one in rows_of(h) if not linears.isdisjoint(one[1].of_experts)]
        as_ever = torch.ones(len(h), dtype=torch.bool, device=h.device)
        for rows, *_ in changed:
            as_ever[rows] = False
        out, others = torch.empty_like(h), as_ever.nonzero().flatten()
        if len(others):
            own = {name: None if x is None else x[others] for name, x in given.items()}
            if gather is not None:
                out[others] = _mixed(plain, h[others], how, {}, 1.0, gather, **own)
            else:
                out[others] = plain.experts(
                    h[others], layer, chosen, activation, normalized=normalized, sigmoid=sigmoid, **own
                )
        for rows, adapter, scale in changed:
            own = {name: None if x is None else x[rows] for name, x in given.items()}
            out[rows] = _mixed(plain, h[rows], how, adapter.of_experts, scale, gather, **own)
        return out

    return experts


def _mixed(
    plain: Operations,
    h: Tensor,
    how: Mixture,
    products: Mapping[int, Mapping[int, Product]],
    scale: float,
    gather: Gather | None,
    *,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
) -> Tensor:
    """Returns the result of experts_torch for h [T, H], with the products of an adapter added to the experts."""
    layer = how.layer

    def multiply(x: Tensor, packed: PackedExperts, expert: int, dtype: torch.dtype) -> Tensor:
        y = _linear(plain, x, packed, expert, dtype)
        if (product := products.get(id(packed), {}).get(expert)) is not None:
            product.add(y, torch.arange(len(y), device=y.device), x, scale, plain.linear)
        return y

    logits = plain.linear(h if router_input is None else router_input, layer.router, fp32_out=True)
    numbers, weights = _choose(logits, how)
    if layer.loads is not None:
        layer.loads.add_(numbers.flatten().bincount(minlength=len(layer.loads)))
    results = torch.empty(*numbers.shape, h.shape[1], device=h.device)  # [T, chosen, H]
    for expert in sorted(set(numbers.flatten().tolist())):
        rows, slots = (numbers == expert).nonzero(as_tuple=True)
        inner = plain.act_and_mul(multiply(h[rows], layer.gate_up, expert, h.dtype), how.activation)
        own = multiply(inner if gather is None else gather(inner), layer.down, expert, torch.float32)
        results[rows, slots] = own if gather is None else gather(own)
    combine = combine_torch if layer.down.cpu is None else experts_c.combine
    return combine(results, weights, add, add_gate, h.dtype)


def _linear(plain: Operations, x: Tensor, packed: PackedExperts, expert: int, dtype: torch.dtype) -> Tensor:
    if packed.cpu is not None:
        return bindings.linear(x, packed.cpu.weight(expert), out_dtype=dtype)
    return plain.linear(x, packed.expert(expert), fp32_out=dtype != x.dtype)


def _choose(logits: Tensor, how: Mixture) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row of logits [T, E] and their weights: [T, chosen] int64 and float32."""
    packed = in_c(how.layer, how.chosen, how.activation, normalized=how.normalized, sigmoid=how.sigmoid)
    if packed is not None:
        numbers, weights = experts_c.choose(logits, packed)
        return numbers.long(), weights
    return choose_experts(
        logits, how.chosen, normalized=how.normalized, scales=how.layer.scales, sigmoid=how.sigmoid,
        choice_bias=how.layer.choice_bias,
    )  # fmt: skip
