"""Runs the experts of a layer in Triton kernels: router, grouping, grouped products, and the sum over a row's experts.

The host reads no value from the device, and no size depends on the router's choice, so a CUDA graph can hold all
kernels.

A slot is one chosen expert of a row. If there are few slots, most slots have an expert of their own; then each slot is
a tile of its own, and only the weights of chosen experts are read. If there are more slots, they are grouped by expert
once for both products. A row's bits are the same in both cases: an element is one chain of additions over K in any tile
(worker/ops/linear/triton.py), and a row's results are added in the order of its slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.activation.triton import act_and_mul_triton, activate_triton
from worker.ops.linear import linear
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.triton_low_bit import fitted
from worker.ops.linear.triton_tiles import Tile
from worker.ops.moe.packed import Experts, Gather, PackedExperts
from worker.ops.moe.triton_grouped import can_be_gated, grouped_linear_triton, quantized_grouped_linear_triton
from worker.ops.moe.triton_routing import Groups, choose_experts_triton, count_loads_triton, group_slots_triton
from worker.spec import ACTIVATIONS, Activation, ExpertGroups

MAX_SLOTS = 1 << 16  # how many slots are computed at once, which limits the memory of the experts' float32 results
BLOCK = 1024


@triton.jit
def _combine_experts_kernel(
    results_ptr, weights_ptr, add_ptr, gate_ptr, out_ptr, size, add_stride,
    CHOSEN: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums `add` and then the weighted results of a row's slots, in the order of the slots, and rounds once. A program
    computes BLOCK columns of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if ADD:
        total = tl.load(add_ptr + row * add_stride + column, mask=mask, other=0.0).to(tl.float32)
        if GATE:
            total *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row)))
    for slot in tl.static_range(CHOSEN):
        result = tl.load(results_ptr + (row * CHOSEN + slot) * size + column, mask=mask, other=0.0)
        total += tl.load(weights_ptr + row * CHOSEN + slot) * result
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def experts_triton(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    gated: bool = True,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
    gather: Gather | None = None,
    groups: ExpertGroups | None = None,
) -> Tensor:
    """Computes the same as `experts_torch` in worker/ops/moe/packed.py: [T, H] in h's dtype."""
    assert activation in ACTIVATIONS and len(h)
    logits = linear(h if router_input is None else router_input, layer.router, fp32_out=True)
    numbers, weights = choose_experts_triton(
        logits, chosen, normalized=normalized, scales=layer.scales, sigmoid=sigmoid, choice_bias=layer.choice_bias,
        groups=groups,
    )  # fmt: skip
    if layer.loads is not None:
        count_loads_triton(numbers, layer.loads)
    out, rows = h.new_empty(len(h), _columns(layer.down)), max(1, MAX_SLOTS // chosen)
    for begin in range(0, len(h), rows):
        part = slice(begin, begin + rows)
        results = _multiply(h[part], layer, logits.shape[1], numbers[part], activation, gather, gated=gated)
        _combine(results, weights[part], _rows(add, part), _rows(add_gate, part), out[part])
    return out


def _rows(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def _multiply(
    h: Tensor,
    layer: Experts,
    count: int,
    numbers: Tensor,
    activation: Activation,
    gather: Gather | None,
    *,
    gated: bool,
) -> Tensor:
    """Returns the results of the rows' experts, which are not weighted yet: [T * chosen, H] float32."""
    rows, chosen = numbers.shape
    is_sorted = rows * chosen > max(chosen, count // 2)
    tile_rows = _tile_rows(layer, rows * chosen, count, h, 1 + gated) if is_sorted else tiles.EXPERT_TILE_ROWS[0]
    groups = group_slots_triton(numbers, count, tile_rows, is_sorted=is_sorted)
    inner = _linear(h, layer.gate_up, groups, tile_rows, activation if gated else None, h.dtype)
    inner = inner if gated else activate_triton(inner, activation)
    inner = inner if gather is None else gather(inner)
    return _linear(inner, layer.down, groups, tile_rows, None, torch.float32)


def _tile_rows(layer: Experts, slots: int, count: int, h: Tensor, products: int) -> int:
    """Returns how many rows a tile may have to fit into shared memory in gate_up and in down. products: of gate_up"""
    rows = tiles.expert_tile_rows(slots, count, h.dtype)
    sizes = [_fitting_rows(layer.gate_up, rows, products, h), _fitting_rows(layer.down, rows, 1, h)]
    return min(sizes)


def _fitting_rows(packed: PackedExperts, rows: int, products: int, x: Tensor) -> int:
    if packed.codes is None:
        return rows
    products = products if can_be_gated(packed.codes) else 1
    fitting = fitted(_tile(packed, rows, products, x), products, packed.codes.packed, x).rows
    return rows if fitting == rows else _fitting_rows(packed, fitting, products, x)


def _linear(
    x: Tensor, packed: PackedExperts, groups: Groups, tile_rows: int, activation: Activation | None, dtype: torch.dtype
) -> Tensor:
    """Returns each slot's product with its expert's weight, in `dtype`. With an activation, returns act(gate) * up,
    where gate and up are the halves of the product.
    """
    if packed.codes is not None and activation is not None and not can_be_gated(packed.codes):
        return act_and_mul_triton(_linear(x, packed, groups, tile_rows, None, dtype), activation)
    tile = _tile(packed, tile_rows, 1 if activation is None else 2, x)
    if packed.codes is not None:
        return quantized_grouped_linear_triton(
            x, packed.codes, packed.bias, groups, tile, activation=activation, dtype=dtype
        )
    return grouped_linear_triton(
        x, packed.weight, packed.bias, packed.scale, groups, tile,
        activation=activation, dtype=dtype, dynamic=packed.dynamic,
    )  # fmt: skip


def linear_per_head_triton(x: Tensor, packed: PackedExperts) -> Tensor:
    """Computes the same as linear_per_head_torch in worker/ops/moe/reference.py. A slot is one head of a row."""
    tokens, heads, _ = x.shape
    numbers = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(tokens)[:, None]
    rows = x.contiguous().flatten(0, 1)
    tile_rows = tiles.EXPERT_TILE_ROWS[0]
    if tokens > 1:
        tile_rows = _fitting_rows(packed, tiles.expert_tile_rows(tokens * heads, heads, x.dtype), 1, x)
    groups = group_slots_triton(numbers, heads, tile_rows, is_sorted=tokens > 1)
    return _linear(rows, packed, groups, tile_rows, None, x.dtype).view(tokens, heads, -1)


def _columns(packed: PackedExperts) -> int:
    return packed.weight.shape[1] if packed.codes is None else packed.codes.rows


def _tile(packed: PackedExperts, rows: int, products: int, x: Tensor) -> Tile:
    columns = _columns(packed)
    tokens = packed.weight.dtype if packed.dynamic else x.dtype
    return tiles.choose_expert_tile(rows, columns // products, products, tokens)


def _combine(results: Tensor, weights: Tensor, add: Tensor | None, gate: Tensor | None, out: Tensor) -> None:
    """Writes the sum of `add` and the weighted results to out [T, H]. Other arguments: see `combine_torch`."""
    rows, size = out.shape
    assert add is None or (add.shape == out.shape and add.stride(1) == 1)
    assert gate is None or (gate.shape == (rows, 1) and gate.is_contiguous() and gate.dtype == torch.float32)
    _combine_experts_kernel[(rows, triton.cdiv(size, BLOCK))](
        results, weights, out if add is None else add, weights if gate is None else gate, out,
        size, out.stride(0) if add is None else add.stride(0),
        CHOSEN=weights.shape[1], ADD=add is not None, GATE=gate is not None, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
