"""The operations of a step in which some rows have an adapter.

For rows without an adapter, linear layers run as in any other step. Nothing is added to their output, because adding
zero would change the sign of a negative zero. For a row with an adapter, the adapter's product is added in float32, and
the sum is rounded once. Rows are grouped by adapter. A row reads no other row, so its bits do not depend on the groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker.lora.loaded import Gather, LoadedAdapter, Product
from worker.models.forward_inputs import ForwardInputs
from worker.operations import Operations
from worker.ops.linear import native as linear_native
from worker.ops.linear.lora_native import RowsC, StepAdaptersC
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import linear_torch
from worker.ops.moe import native as experts_c
from worker.ops.moe.packed import Experts, PackedExperts, in_c
from worker.ops.moe.reference import choose_experts, combine_torch
from worker.scheduler.sequence import Chunk
from worker.spec import Activation, ExpertGroups

if TYPE_CHECKING:
    from worker.lora.triton import ProductsOnGpu


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step with one adapter. of_all: the indices of these rows among all T rows of the step, ascending"""

    adapter: LoadedAdapter
    scale: float
    of_all: Tensor


@dataclass(frozen=True, slots=True)
class RowsOfStep:
    """The same as AdapterRows, and of_logits: the indices of these rows among the R rows with logits"""

    adapter: LoadedAdapter
    scale: float
    of_all: Tensor
    of_logits: Tensor


def rows_of_adapters(chunks: Sequence[Chunk], device: torch.device) -> list[AdapterRows]:
    """Returns the rows of each adapter of a step."""
    chunk_of_row = torch.repeat_interleave(torch.tensor([chunk.length for chunk in chunks]))
    uses = [chunk.sequence.adapter for chunk in chunks]
    keys = [None if use is None else (id(use.loaded), use.adapter.scale) for use in uses]
    adapters = {key: use for key, use in zip(keys, uses, strict=True) if use is not None}
    found = []
    for key, use in adapters.items():
        has = torch.tensor([one == key for one in keys])[chunk_of_row].to(device)
        found.append(AdapterRows(use.loaded, use.adapter.scale, has.nonzero().flatten()))
    return found


def _with_logits(one: AdapterRows, total: int, logits_indices: Tensor) -> RowsOfStep:
    has = torch.zeros(total, dtype=torch.bool, device=logits_indices.device)
    has[one.of_all] = True
    return RowsOfStep(one.adapter, one.scale, one.of_all, has[logits_indices].nonzero().flatten())


@dataclass(frozen=True, slots=True)
class OperationsWithAdapters(Operations):
    """The operations of a step with adapters.

    plain: the operations of the model; rows: the rows of each adapter; total: the number of rows of the step
    gather: see operations_of_rows
    """

    plain: Operations
    rows: Sequence[RowsOfStep]
    total: int
    gather: Gather | None = None

    def in_c(self) -> StepAdaptersC | None:
        found = [
            RowsC(one.adapter.in_c, one.scale, one.of_all, one.of_logits)
            for one in self.rows
            if one.adapter.in_c is not None
        ]
        return StepAdaptersC(found) if len(found) == len(self.rows) else None

    @property
    def adapters(self) -> list[AdapterRows]:
        """The adapters of the step, without the rows with logits."""
        return [AdapterRows(one.adapter, one.scale, one.of_all) for one in self.rows]

    def rows_of(self, x: Tensor) -> list[tuple[Tensor, LoadedAdapter, float]]:
        """Returns (indices of rows, adapter, scale) for each adapter of the rows of x [T, K]."""
        all_rows = len(x) == self.total
        found = [(one.of_all if all_rows else one.of_logits, one.adapter, one.scale) for one in self.rows]
        return [one for one in found if len(one[0])]

    def changing(self, x: Tensor, packed: PackedLinear) -> list[tuple[Tensor, Product, float]]:
        """Returns (indices of rows, product, scale) for each adapter that changes this linear layer for x [T, K]."""
        found = [(rows, adapter.products.get(id(packed)), scale) for rows, adapter, scale in self.rows_of(x)]
        return [(rows, product, scale) for rows, product, scale in found if product is not None]

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        if self.gather is None and not self.changing(x, packed):
            return self.plain.linear_add_norm(x, packed, residual, weight, eps, **how)
        return self.plain.add_rms_norm(self.linear(x, packed), residual, weight, eps, **how)


def operations_with_adapters(
    plain: Operations, chunks: Sequence[Chunk], inputs: ForwardInputs, logits_on_host: Tensor | None = None
) -> Operations:
    """Returns the operations for a step whose chunks have adapters.

    logits_on_host: inputs.logits_indices of these chunks on the host, with which this does not wait for a GPU
    """
    device = inputs.positions.device
    # a drafter that reads hidden states adds rows to those of the chunks
    same = logits_on_host is not None and len(logits_on_host) == len(inputs.logits_indices)
    logits = logits_on_host if logits_on_host is not None and same else inputs.logits_indices.cpu()
    rows = [_with_logits(one, len(inputs.positions), logits) for one in rows_of_adapters(chunks, logits.device)]
    if device != logits.device:
        rows = [replace(one, of_all=_sent(one.of_all, device), of_logits=_sent(one.of_logits, device)) for one in rows]
    return _operations(plain, rows, inputs, None)


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    return rows.pin_memory().to(device, non_blocking=True)


def operations_of_rows(
    plain: Operations, adapters: Sequence[AdapterRows], inputs: ForwardInputs, gather: Gather | None = None
) -> Operations:
    """Returns the operations for a step in which some rows have adapters.

    gather: returns the columns of all ranks for the columns of this one, if each rank has a part of every layer
        (worker/models/sharding.py)
    """
    rows = [_with_logits(one, len(inputs.positions), inputs.logits_indices) for one in adapters]
    return _operations(plain, rows, inputs, gather)


def _operations(
    plain: Operations, rows: Sequence[RowsOfStep], inputs: ForwardInputs, gather: Gather | None
) -> Operations:
    def linear(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
        changing = made.changing(x, packed)
        if not changing:
            return plain.linear(x, packed, fp32_out=fp32_out, split_k=split_k)
        y = plain.linear(x, packed, fp32_out=fp32_out)
        if on_gpu is not None:
            on_gpu.add(y, x, changing)
            return y
        for rows, product, scale in changing:
            product.add(y, rows, x[rows], scale, plain.linear)
        return y

    def gated_linear(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
        changing = made.changing(x, packed)
        if not changing:
            return plain.gated_linear(x, packed, activation)
        rows = torch.cat([rows for rows, *_ in changing])
        own = plain.linear(x[rows], packed)
        if on_gpu is not None:
            on_gpu.add(own, x[rows], changing, together=True)
        else:
            inside = torch.arange(len(rows), device=x.device).split_with_sizes([len(rows) for rows, *_ in changing])
            for at, (rows_of_one, product, scale) in zip(inside, changing, strict=True):
                product.add(own, at, x[rows_of_one], scale, plain.linear)
        changed = plain.act_and_mul(own, activation)
        y = (
            x.new_empty((len(x), changed.shape[1]))
            if len(rows) == len(x)
            else plain.gated_linear(x, packed, activation)
        )
        y[rows] = changed
        return y

    bound = {item.name: getattr(plain, item.name) for item in fields(Operations)}
    bound |= {"linear": linear if gather is None else _gathering(linear, gather), "gated_linear": gated_linear}
    on_gpu = _on_gpu(plain, inputs.positions)
    if any([one.adapter.of_experts for one in rows]):
        bound |= {"experts": experts_with_adapters(plain, lambda h: made.rows_of(h), gather)}
    made = OperationsWithAdapters(**bound, plain=plain, rows=rows, total=len(inputs.positions), gather=gather)
    return made


def _gathering(linear: Callable[..., Tensor], gather: Gather) -> Callable[..., Tensor]:
    """Returns the operation `linear` of a rank, which gathers inputs and outputs as the loop in C does.

    The layer before a linear has computed only this rank's columns of its inputs, or the inputs are whole already.
    """

    def whole(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        assert packed.cpu is not None
        if x.shape[1] == packed.cpu.k:
            return linear(x, packed, **how)
        return gather(linear(gather(x), packed, **how))

    return whole


def _on_gpu(plain: Operations, positions: Tensor) -> "ProductsOnGpu | None":
    """Returns a ProductsOnGpu where Triton's kernels run, else None."""
    if not positions.is_cuda or plain.linear is linear_torch:
        return None
    from worker.lora.triton import ProductsOnGpu

    return ProductsOnGpu()


# Computes the mixture of experts for rows whose adapter changes experts.
#
# The kernels compute all experts of a step together, and cannot add an adapter's products in between. This module
# therefore computes rows with such an adapter expert by expert, and the kernels compute all other rows. Experts are
# chosen and summed as in the kernels, and the bits of a row do not depend on other rows.

Rows = tuple[Tensor, LoadedAdapter, float]  # (indices of rows, their adapter, the adapter's scale)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's experts, and the options of the operation (see experts_torch in worker/ops/moe/packed.py)."""

    layer: Experts
    chosen: int
    activation: Activation
    normalized: bool
    sigmoid: bool
    gated: bool
    groups: ExpertGroups | None


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
        gated: bool = True,
        groups: ExpertGroups | None = None,
        **given: Tensor | None,
    ) -> Tensor:
        how = Mixture(layer, chosen, activation, normalized, sigmoid, gated, groups)
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
                    h[others],
                    layer,
                    chosen,
                    activation,
                    normalized=normalized,
                    sigmoid=sigmoid,
                    gated=gated,
                    groups=groups,
                    **own,
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
        wide = multiply(h[rows], layer.gate_up, expert, h.dtype)
        inner = plain.act_and_mul(wide, how.activation) if how.gated else plain.activate(wide, how.activation, None)
        own = multiply(inner if gather is None else gather(inner), layer.down, expert, torch.float32)
        results[rows, slots] = own if gather is None else gather(own)
    combine = combine_torch if layer.down.cpu is None else experts_c.combine
    return combine(results, weights, add, add_gate, h.dtype)


def _linear(plain: Operations, x: Tensor, packed: PackedExperts, expert: int, dtype: torch.dtype) -> Tensor:
    if packed.cpu is not None:
        return linear_native.linear(x, packed.cpu.weight(expert), out_dtype=dtype)
    return plain.linear(x, packed.expert(expert), fp32_out=dtype != x.dtype)


def _choose(logits: Tensor, how: Mixture) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row of logits [T, E] and their weights: [T, chosen] int64 and float32."""
    routing: dict[str, Any] = {"normalized": how.normalized, "sigmoid": how.sigmoid, "groups": how.groups}
    packed = in_c(how.layer, how.chosen, how.activation, **routing)
    if packed is not None:
        numbers, weights = experts_c.choose(logits, packed)
        return numbers.long(), weights
    return choose_experts(logits, how.chosen, scales=how.layer.scales, choice_bias=how.layer.choice_bias, **routing)
