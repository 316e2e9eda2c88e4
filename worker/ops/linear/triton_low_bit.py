"""Triton kernels for linear with a weight of four or eight bits (worker/kernels/weights/quantized_weight.py).

The products have the same bits as those of linear.py with the dequantized weight: K is split into the same chains, and
a chain has the same order. A program reads codes, turns them into numbers of the tokens' format in registers
(dequantize.py), and multiplies these numbers. Tokens keep their format.

With few tokens, reading the codes takes most of the time, and turning them into numbers takes nearly as long. With many
tokens, tiles are large, so that a code is turned into a number only once for 128 or 256 tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.dependent_launch import launch_dependents, product_options, wait_for_kernels
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions
from worker.kernels.gpu.products import tiles
from worker.kernels.gpu.products.chains import load_bias, tile_index
from worker.kernels.gpu.products.code_chains import (
    accumulate_chain,
    accumulate_gated_chain,
    code_offsets,
    prefetch_codes,
    row_words,
)
from worker.kernels.gpu.products.dequantize import Format
from worker.kernels.gpu.products.packed_codes import ROWS, STEP, PackedCodes
from worker.kernels.gpu.products.tile_table import Tile, cdiv
from worker.kernels.gpu.rowwise.act_and_mul import act_times_up
from worker.kernels.rowwise.activate import ACTIVATIONS


@triton.jit(do_not_specialize=["rows"])
def _quantized_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr,
    rows, columns, depth, chain, x_stride, out_stride, weight_rows,
    BIAS: tl.constexpr, MULTIPLE_CHAINS: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes x @ weight.T like _linear_kernel in linear.py. Each program multiplies BLOCK_M tokens by BLOCK_N weight
    rows.

    weight_rows: how many rows the weight has, including the padding of the last tile
    out_stride: elements from one token of the output to the next
    """
    launch_dependents(PDL)
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    loaded_n = n < weight_rows - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    codes_ptrs = codes_ptr + first_n * row_words(depth, FORMAT) + code_offsets(n, depth, FORMAT)
    scale_ptrs, minimum_ptrs = scale_ptr + first_n + n, minimum_ptr + first_n + n
    part = tl.program_id(1)
    begin = part * chain
    end = min(begin + chain, depth) if MULTIPLE_CHAINS else depth
    prefetch_codes(codes_ptr, first_n, begin, end, depth, weight_rows, FORMAT, BLOCK_N, PREFETCH)
    wait_for_kernels(PDL)
    acc = accumulate_chain(
        codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, begin, end, depth, weight_rows,
        FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # BIAS is a constant, `part` is not
        if part == 0:
            acc += load_bias(bias_ptr + first_n, n, mask_n)
    if MULTIPLE_CHAINS and not WRITE_PARTIALS:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            acc += accumulate_chain(
                codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, begin, end, depth,
                weight_rows, FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    out_ptrs = out_ptr + (part * rows + first_m) * out_stride + first_n + m[None, :] * out_stride + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def _quantized_gated_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr,
    rows, columns, depth, x_stride, weight_rows,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes act(x @ gate) * (x @ up) like _gated_linear_kernel in linear.py."""
    launch_dependents(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    gate_ptrs = codes_ptr + first_n * row_words(depth, FORMAT) + code_offsets(n, depth, FORMAT)
    up_ptrs = gate_ptrs + columns.to(tl.int64) * row_words(depth, FORMAT)
    gate_scale, gate_minimum = scale_ptr + first_n + n, minimum_ptr + first_n + n
    if PREFETCH:
        for first in tl.static_range(2):
            half = first_n + first * columns
            prefetch_codes(codes_ptr, half, 0, depth, depth, weight_rows, FORMAT, BLOCK_N, PREFETCH // 2)
    wait_for_kernels(PDL)
    gate, up = accumulate_gated_chain(
        gate_ptrs, up_ptrs, gate_scale, gate_minimum, columns, table_ptr, x_ptrs, mask_n, mask_m, depth, weight_rows,
        FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:
        gate += load_bias(bias_ptr + first_n, n, mask_n)
        up += load_bias(bias_ptr + columns + first_n, n, mask_n)
    out_ptrs = out_ptr + first_m * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_ptrs, act_times_up(gate.to(dtype), up.to(dtype), ACTIVATION), mask=mask_n[:, None] & mask_m[None, :])


def quantized_linear_triton(
    x: Tensor,
    parts: Sequence[PackedCodes],
    bias: Tensor | None,
    *,
    fp32_out: bool = False,
    split_k: bool = False,
    whole_rows: int = 0,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    """Returns x [T, K] @ weight [N, K].T + bias [N], [T, N] in x's dtype, or in float32 if `fp32_out`.

    The rows of the weight are the rows of `parts`, one part after another. Additions over K are in the order of the
    codes, which an input order may change.
    split_k: if true, the result may be partial sums [S, T, N] float32 instead (worker/kernels/split_k.py)
    whole_rows: see PackedLinear
    """
    rows, depth = _check(x, parts, bias)
    columns, dtype = sum(part.shape[0] for part in parts), torch.float32 if fp32_out else x.dtype
    chain = tiles.chain_length(whole_rows or columns, depth)
    chains = cdiv(depth, chain)
    device = tiles.kind_of(x.device)
    choices = [tiles.choose_tile(rows, part.shape[0], depth, x.dtype, device, split_k=split_k) for part in parts]
    chosen = [fitted(tile, 1, part, x) for tile, part in zip(choices, parts, strict=True)]
    counts = [tile.count(rows, part.shape[0]) for tile, part in zip(chosen, parts, strict=True)]
    use_split_k = split_k and chains > 1 and tiles.needs_split_k(rows, sum(counts), *chosen)
    shape, dtype = ((chains, rows, columns), torch.float32) if use_split_k else ((rows, columns), dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    begin = 0
    for tile, count, part in zip(chosen, counts, parts, strict=True):
        tokens = _ordered(x, part)
        _quantized_linear_kernel[(count, chains if use_split_k else 1)](
            tokens, *operands(part), x if bias is None else bias[begin:], out[..., begin:],
            rows, part.shape[0], depth, chain, tokens.stride(0), columns, part.padded_rows,
            BIAS=bias is not None, MULTIPLE_CHAINS=chains > 1, WRITE_PARTIALS=use_split_k,
            **launch_options(tile, 1, part, x), **product_options(options, tile.rows),
        )  # fmt: skip
        begin += part.shape[0]
    return out


def quantized_gated_linear_triton(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, activation: str, *,
    whole_rows: int = 0, options: GpuOptions = NO_OPTIONS,
) -> Tensor:  # fmt: skip
    """Returns act(x @ gate) * (x @ up), [T, I], for x [T, K], weight [2 I, K] and bias [2 I].

    The weight has the rows of gate first, then the rows of up. Both products have the same bits as with
    `quantized_linear_triton`. Allowed only if can_be_gated([weight], whole_rows).
    whole_rows: see PackedLinear.
    """
    rows, depth = _check(x, [weight], bias)
    assert can_be_gated([weight], whole_rows) and activation in ACTIVATIONS
    columns, tokens = weight.shape[0] // 2, _ordered(x, weight)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tile = fitted(tiles.choose_gated_tile(rows, columns, depth, x.dtype, tiles.kind_of(x.device)), 2, weight, x)
    _quantized_gated_linear_kernel[(tile.count(rows, columns),)](
        tokens, *operands(weight), x if bias is None else bias, out,
        rows, columns, depth, tokens.stride(0), weight.padded_rows, BIAS=bias is not None, ACTIVATION=activation,
        **launch_options(tile, 2, weight, x), **product_options(options, tile.rows),
    )  # fmt: skip
    return out


def can_be_gated(parts: Sequence[PackedCodes], whole_rows: int = 0) -> bool:
    """Returns whether one kernel can compute gate and up. It can if they have the same format, K is one chain, and gate
    consists of whole tiles.
    """
    columns, depth = parts[0].shape
    return len(parts) == 1 and columns % (2 * ROWS) == 0 and tiles.chain_length(whole_rows or columns, depth) >= depth


def fitted(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> Tile:
    """Returns the tile with as many stages as fit into shared memory. If not even two stages fit, the returned tile has
    fewer tokens.
    """
    size = stage_bytes(tile, products, weight, x)
    stages = tiles.stages_within(tile, size, x.device, shared=tile.rows <= 32)
    if stages > 1 or tile.rows <= 16:
        return replace(tile, stages=stages)
    return fitted(replace(tile, rows=tile.rows // 2), products, weight, x)


def stage_bytes(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> int:
    """Returns the bytes of shared memory of one stage: STEP inputs of all tokens and weight rows of a program."""
    row_bytes = STEP * weight.code_map.bits // 8 + weight.scale_bytes_in_step()
    return tile.rows * STEP * x.element_size() + products * tile.columns * row_bytes


def launch_options(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> dict[str, Any]:
    """Returns a kernel's constants and launch options. products: 2 if a program computes gate and up, else 1"""
    return {
        "FORMAT": Format.of(weight, x.dtype), "EVEN": weight.padded_rows % (products * tile.columns) == 0,
        "EVEN_K": weight.shape[1] % STEP == 0,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tiles.GROUP,
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False,
    }  # fmt: skip


def operands(weight: PackedCodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return weight.codes, weight.scale, weight.scale if weight.minimum is None else weight.minimum, weight.table


def _ordered(x: Tensor, weight: PackedCodes) -> Tensor:
    return x if weight.input_order is None else x.index_select(1, weight.input_order)


def _check(x: Tensor, parts: Sequence[PackedCodes], bias: Tensor | None) -> tuple[int, int]:
    rows, depth = x.shape
    assert all(part.shape[1] == depth for part in parts)
    assert rows and (x.stride(1) == 1 or depth == 1)
    assert rows == 1 or x.stride(0) <= 1 << 23  # offsets within a tile of 256 rows fit in 32 bits
    assert bias is None or (bias.shape == (sum(part.shape[0] for part in parts),) and bias.is_contiguous())
    return rows, depth
