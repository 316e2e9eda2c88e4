"""Triton kernels for one linear of many experts, with weights of 16 or 8 bits. The input of each slot is multiplied by
the weight of its expert.

The products are computed as in worker/ops/linear/triton.py, but K is always one chain, because many experts keep a GPU
busy even if K is not split. So a slot has the same bits in every tile. For a weight of this shape, `linear_triton`
gives the same bits if it uses a single chain, too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.activation.triton import act_times_up
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.packed_codes import ROWS
from worker.ops.linear.triton import kernel_view
from worker.ops.linear.triton_accumulate import (
    accumulate_chain,
    accumulate_gated_chain,
    apply_scales,
    load_bias,
    load_scales,
    tile_index,
)
from worker.ops.linear.triton_low_bit import (
    accumulate_codes,
    accumulate_gated_codes,
    code_offsets,
    fitted,
    launch_options,
    operands,
    row_words,
)
from worker.ops.linear.triton_tiles import Tile, cdiv
from worker.ops.moe.packed import ExpertCodes
from worker.ops.moe.triton_routing import TABLE_COLUMNS, Groups, load_group
from worker.ops.triton_common import quantize_tokens_triton


@triton.jit(do_not_specialize=["tiles"])
def _grouped_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, numbers_ptr, order_ptr, table_ptr,
    tiles, columns, depth, x_stride,
    SLOTS_PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of a tile's slots (triton_routing.py) by their expert's weight, up to BLOCK_M x BLOCK_N."""
    tile, tile_n = tile_index(tl.program_id(0), tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    expert, slots, rows = load_group(numbers_ptr, order_ptr, table_ptr, tile, m, COLUMNS, SORTED)
    if rows == 0:
        return
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    mask_m, mask_n = m < rows, n < columns - first_n
    first_row, x_rows = expert * columns + first_n, slots // SLOTS_PER_ROW
    x_ptrs = x_ptr + x_rows[None, :] * x_stride + k[:, None]
    weight_ptrs = weight_ptr + first_row * depth + n[:, None] * depth + k[None, :]
    scale = load_scales(scale_ptr + first_row, n, mask_n, FORMAT or DYNAMIC)
    token_scale = load_scales(token_scale_ptr, x_rows, mask_m, DYNAMIC)
    acc = accumulate_chain(
        weight_ptrs, x_ptrs, mask_n, mask_m, 0, depth, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIAS:
        acc += load_bias(bias_ptr + first_row, n, mask_n)
    out_ptrs = out_ptr + slots[None, :] * columns + first_n + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _grouped_gated_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, numbers_ptr, order_ptr, table_ptr,
    tiles, columns, depth, x_stride,
    SLOTS_PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes act(x @ gate) * (x @ up). An expert's weight has `columns` rows of gate, then as many rows of up."""
    tile, tile_n = tile_index(tl.program_id(0), tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    expert, slots, rows = load_group(numbers_ptr, order_ptr, table_ptr, tile, m, COLUMNS, SORTED)
    if rows == 0:
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    mask_m, mask_n = m < rows, n < columns - first_n
    first_row, x_rows = expert * 2 * columns + first_n, slots // SLOTS_PER_ROW
    x_ptrs = x_ptr + x_rows[None, :] * x_stride + k[:, None]
    gate_ptrs = weight_ptr + first_row * depth + n[:, None] * depth + k[None, :]
    up_ptrs = gate_ptrs + columns.to(tl.int64) * depth
    gate, up = accumulate_gated_chain(
        gate_ptrs, up_ptrs, x_ptrs, mask_n, mask_m, depth, EVEN, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K
    )
    token_scale = load_scales(token_scale_ptr, x_rows, mask_m, DYNAMIC)
    gate_scale = load_scales(scale_ptr + first_row, n, mask_n, FORMAT or DYNAMIC)
    up_scale = load_scales(scale_ptr + first_row + columns, n, mask_n, FORMAT or DYNAMIC)
    gate = apply_scales(gate, gate_scale, token_scale, FORMAT, DYNAMIC)
    up = apply_scales(up, up_scale, token_scale, FORMAT, DYNAMIC)
    if BIAS:
        gate += load_bias(bias_ptr + first_row, n, mask_n)
        up += load_bias(bias_ptr + first_row + columns, n, mask_n)
    out_ptrs = out_ptr + slots[None, :] * columns + first_n + n[:, None]
    tl.store(out_ptrs, act_times_up(gate.to(dtype), up.to(dtype), ACTIVATION), mask=mask_n[:, None] & mask_m[None, :])


def grouped_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    groups: Groups,
    tile: Tile,
    *,
    activation: str | None,
    dtype: torch.dtype,
    dynamic: bool = False,
) -> Tensor:
    """Returns x @ weight[expert].T + bias[expert] for each slot, [slots, N] in `dtype`.

    x [slots / n, K]: each row belongs to n slots; weight [E, N, K]; bias and scale [E, N]
    scale: given if the weight is int8 or float8_e4m3fn
    dynamic: if true, rows of x are quantized to the weight's format, too
    activation: if given, the result is act(gate) * up, [slots, N / 2]; gate and up are the halves of the product
    """
    (_, stacked, depth), slots = weight.shape, groups.numbers.numel()
    assert weight.is_contiguous() and x.stride(1) == 1 and x.shape[1] == depth and slots % len(x) == 0
    per_row, columns, products = slots // len(x), stacked if activation is None else stacked // 2, 1 + bool(activation)
    out = torch.empty(slots, columns, dtype=dtype, device=x.device)
    x, token_scale = quantize_tokens_triton(x, weight.dtype) if dynamic else (x, None)
    gate: dict[str, Any] = {} if activation is None else {"ACTIVATION": activation}
    kernel = _grouped_linear_kernel if activation is None else _grouped_gated_linear_kernel
    kernel[(groups.tiles * cdiv(columns, tile.columns),)](
        x, kernel_view(weight, dynamic), *(x if one is None else one for one in (bias, scale, token_scale)), out,
        groups.numbers, groups.order, groups.table, groups.tiles, columns, depth, x.stride(0),
        SLOTS_PER_ROW=per_row, COLUMNS=TABLE_COLUMNS, SORTED=groups.is_sorted, BIAS=bias is not None, **gate,
        num_warps=tile.warps, num_stages=tiles.stages_that_fit(tile, products * tile.columns, x, weight),
        enable_fp_fusion=False, **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


# Triton kernels for one linear of many experts, with weights of four or eight bits that have a scale per group.
#
# The products have the same bits as those of triton_grouped.py with the dequantized weights.


@triton.jit(do_not_specialize=["tiles"])
def _quantized_grouped_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr, numbers_ptr, order_ptr, groups_ptr,
    tiles, columns, depth, x_stride, expert_rows, weight_rows,
    SLOTS_PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies slots by their expert's weight. A program multiplies up to BLOCK_M slots by BLOCK_N weight rows.

    expert_rows: the rows of an expert, including the padding of its last tile; weight_rows: the rows of all experts
    """
    tile, tile_n = tile_index(tl.program_id(0), tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    expert, slots, rows = load_group(numbers_ptr, order_ptr, groups_ptr, tile, m, COLUMNS, SORTED)
    if rows == 0:
        return
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    mask_m, mask_n, loaded_n = m < rows, n < columns - first_n, n < expert_rows - first_n
    first_row, x_rows = expert * expert_rows + first_n, slots // SLOTS_PER_ROW
    x_ptrs = x_ptr + x_rows[None, :] * x_stride + k[:, None]
    codes_ptrs = codes_ptr + first_row * row_words(depth, FORMAT) + code_offsets(n, depth, FORMAT)
    scale_ptrs, minimum_ptrs = scale_ptr + first_row + n, minimum_ptr + first_row + n
    acc = accumulate_codes(
        codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, 0, depth, depth, weight_rows,
        FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:
        acc += load_bias(bias_ptr + expert * columns + first_n, n, mask_n)
    out_ptrs = out_ptr + slots[None, :] * columns + first_n + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["tiles"])
def _quantized_grouped_gated_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr, numbers_ptr, order_ptr, groups_ptr,
    tiles, columns, depth, x_stride, expert_rows, weight_rows,
    SLOTS_PER_ROW: tl.constexpr, COLUMNS: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes act(x @ gate) * (x @ up). An expert's weight has `columns` rows of gate, then as many rows of up."""
    tile, tile_n = tile_index(tl.program_id(0), tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    expert, slots, rows = load_group(numbers_ptr, order_ptr, groups_ptr, tile, m, COLUMNS, SORTED)
    if rows == 0:
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first_n = (tile_n * BLOCK_N).to(tl.int64)
    mask_m, mask_n = m < rows, n < columns - first_n
    first_row, x_rows = expert * expert_rows + first_n, slots // SLOTS_PER_ROW
    x_ptrs = x_ptr + x_rows[None, :] * x_stride + k[:, None]
    gate_ptrs = codes_ptr + first_row * row_words(depth, FORMAT) + code_offsets(n, depth, FORMAT)
    up_ptrs = gate_ptrs + columns.to(tl.int64) * row_words(depth, FORMAT)
    scale_ptrs, minimum_ptrs = scale_ptr + first_row + n, minimum_ptr + first_row + n
    gate, up = accumulate_gated_codes(
        gate_ptrs, up_ptrs, scale_ptrs, minimum_ptrs, columns, table_ptr, x_ptrs, mask_n, mask_m, depth, weight_rows,
        FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:
        first_bias = expert * 2 * columns + first_n
        gate += load_bias(bias_ptr + first_bias, n, mask_n)
        up += load_bias(bias_ptr + first_bias + columns, n, mask_n)
    out_ptrs = out_ptr + slots[None, :] * columns + first_n + n[:, None]
    tl.store(out_ptrs, act_times_up(gate.to(dtype), up.to(dtype), ACTIVATION), mask=mask_n[:, None] & mask_m[None, :])


def quantized_grouped_linear_triton(
    x: Tensor,
    weight: ExpertCodes,
    bias: Tensor | None,
    groups: Groups,
    tile: Tile,
    *,
    activation: str | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns x @ weight[expert].T + bias[expert] for each slot, [slots, N] in `dtype`.

    x, bias, activation and the result are as for `grouped_linear_triton`. The tile must fit into shared memory (see
    `fitted`). An activation is allowed only if can_be_gated(weight).
    """
    packed, slots, depth = weight.packed, groups.numbers.numel(), weight.packed.shape[1]
    assert x.stride(1) == 1 and x.shape[1] == depth and slots % len(x) == 0
    columns, products = weight.rows if activation is None else weight.rows // 2, 1 + bool(activation)
    out = torch.empty(slots, columns, dtype=dtype, device=x.device)
    fitting = fitted(tile, products, packed, x)
    assert fitting.rows == tile.rows, "the groups are of the tile's rows"
    options = launch_options(fitting, products, packed, x)
    options["EVEN"] = (columns if activation else weight.padded_rows) % tile.columns == 0
    gate: dict[str, Any] = {} if activation is None else {"ACTIVATION": activation}
    kernel = _quantized_grouped_linear_kernel if activation is None else _quantized_grouped_gated_linear_kernel
    kernel[(groups.tiles * cdiv(columns, tile.columns),)](
        x, *operands(packed), x if bias is None else bias, out, groups.numbers, groups.order, groups.table,
        groups.tiles, columns, depth, x.stride(0), weight.padded_rows, packed.padded_rows,
        SLOTS_PER_ROW=slots // len(x), COLUMNS=TABLE_COLUMNS, SORTED=groups.is_sorted, BIAS=bias is not None,
        **gate, **options,
    )  # fmt: skip
    return out


def can_be_gated(weight: ExpertCodes) -> bool:
    """Returns whether one kernel can compute gate and up. It can if the rows of gate end where a tile ends."""
    return weight.rows % (2 * ROWS) == 0
