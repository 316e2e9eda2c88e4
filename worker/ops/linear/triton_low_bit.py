"""Triton kernels for linear with a weight of four or eight bits (worker/ops/quantized_weight.py).

The products have the same bits as those of triton.py with the dequantized weight: K is split into the same chains, and
a chain has the same order. A program reads codes, turns them into numbers of the tokens' format in registers
(triton_dequantize.py), and multiplies these numbers. Tokens keep their format.

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

from worker.ops.activation.triton import act_times_up
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.packed_codes import ROWS, STEP, PackedCodes
from worker.ops.linear.triton_accumulate import load_bias, load_tokens, tile_index
from worker.ops.linear.triton_dequantize import Format, dequantize, widen_half
from worker.ops.linear.triton_tiles import Tile, cdiv
from worker.ops.triton_common import launch_dependents, prefetch_to_l2, product_options, wait_for_kernels
from worker.spec import ACTIVATIONS


@triton.jit(do_not_specialize=["rows"])
def _quantized_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr,
    rows, columns, depth, chain, x_stride, out_stride, weight_rows,
    BIAS: tl.constexpr, MULTIPLE_CHAINS: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes x @ weight.T like _linear_kernel in triton.py. Each program multiplies BLOCK_M tokens by BLOCK_N weight
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
    acc = accumulate_codes(
        codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, begin, end, depth, weight_rows,
        FORMAT, EVEN, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # BIAS is a constant, `part` is not
        if part == 0:
            acc += load_bias(bias_ptr + first_n, n, mask_n)
    if MULTIPLE_CHAINS and not WRITE_PARTIALS:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            acc += accumulate_codes(
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
    """Computes act(x @ gate) * (x @ up) like _gated_linear_kernel in triton.py."""
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
    gate, up = accumulate_gated_codes(
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
    split_k: if true, the result may be partial sums [S, T, N] float32 instead (worker/ops/norm/reference.py)
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


# Functions for kernels that multiply by weights with a scale per group: they compute one chain over K for a tile.
#
# Chains advance along K as in triton_accumulate.py. EVEN: no tile crosses an edge of the weight's rows. EVEN_K: K is
# a multiple of STEP. Otherwise, words and scales are padded to a multiple of STEP, and only the activations of the
# tokens end at K.

_STEP, _ROWS = tl.constexpr(STEP), tl.constexpr(ROWS)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=mask, other=0)


@triton.jit
def load_words(codes_ptrs, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Loads words [N, part_inputs]: block BLOCK of the blocks that together encode the STEP inputs from `at` on."""
    size: tl.constexpr = _ROWS * FORMAT.part_inputs
    return _load(codes_ptrs + (at // _STEP * FORMAT.blocks + BLOCK) * size, mask[:, None], EVEN)


@triton.jit
def _load_inputs(
    x_ptrs, at, mask, depth, FORMAT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Loads the tokens' activations [part_inputs, M] that are multiplied by part PART of block BLOCK."""
    first: tl.constexpr = (BLOCK * FORMAT.parts + PART) * FORMAT.part_inputs
    return load_tokens(x_ptrs + at + first, mask, at + first + tl.arange(0, FORMAT.part_inputs), depth, EVEN_K)


@triton.jit
def _load_scale(
    scale_ptrs, minimum_ptrs, at, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Loads scale and minimum [N] of part PART of block BLOCK, in the form that `dequantize` needs.

    at: a multiple of STEP. PackedCodes describes the words. A word with the scales of two groups is turned into a word
    that has the scale of one group twice. The two groups compute the address of the word by the same expression, so the
    word is loaded only once. Shifts are constants, because otherwise the compiler passes the weights through shared
    memory.
    """
    first: tl.constexpr = (BLOCK * FORMAT.parts + PART) * FORMAT.part_inputs
    size: tl.constexpr = FORMAT.group_size
    narrow: tl.constexpr = FORMAT.narrow
    inputs: tl.constexpr = size * 2 if FORMAT.pairs else size
    group = 0 if size == 0 else at // inputs + first // inputs
    word = _load(scale_ptrs + group * weight_rows, mask, EVEN)
    if narrow == "":
        scale = word
        minimum = _load(minimum_ptrs + group * weight_rows, mask, EVEN) if FORMAT.has_minimum else word
    elif FORMAT.has_minimum:
        scale, minimum = widen_half(word, narrow), widen_half(word >> 16, narrow)
    else:
        if FORMAT.pairs:
            upper: tl.constexpr = first // size % 2 == 1
            word = (word & -65536) | ((word >> 16) & 0xFFFF) if upper else (word & 0xFFFF) | (word << 16)
        scale = word if FORMAT.exact else widen_half(word, narrow)
        minimum = scale
    return scale, minimum


@triton.jit
def load_part(
    words, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask, dtype: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns the weights [N, part_inputs] in `dtype` of part PART of the words of block BLOCK."""
    scale, minimum = _load_scale(scale_ptrs, minimum_ptrs, at, weight_rows, mask, FORMAT, EVEN, BLOCK, PART)
    return dequantize(words, scale, minimum, table_ptr, dtype, FORMAT, PART)


@triton.jit
def _accumulate(
    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns acc [N, M] + weight [N, part_inputs] @ x [part_inputs, M] for part PART of the words of block BLOCK."""
    weight = load_part(
        words, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask, x.dtype, FORMAT, EVEN, BLOCK, PART
    )
    return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def accumulate_codes(
    codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, mask_n, mask_m, begin, end, depth, weight_rows,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the chain over K = begin .. end - 1, starting from zero, [N, M] float32. begin: a multiple of STEP"""
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(begin, end, _STEP):
        for block in tl.static_range(blocks):
            words = load_words(codes_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN_K, block, part)
                acc = _accumulate(
                    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    return acc


@triton.jit
def accumulate_gated_codes(
    gate_ptrs, up_ptrs, gate_scale, gate_minimum, columns, table_ptr, x_ptrs, mask_n, mask_m, depth, weight_rows,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the chains of gate and up over all of K. Returns the two chains, each [N, M] float32.

    columns: how many rows of the weight belong to gate; the rows of up follow
    """
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    up_scale, up_minimum = gate_scale + columns, gate_minimum + columns
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(0, depth, _STEP):
        for block in tl.static_range(blocks):
            gate_words = load_words(gate_ptrs, at, mask_n, FORMAT, EVEN, block)
            up_words = load_words(up_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN_K, block, part)
                gate = _accumulate(
                    gate, gate_words, x, at, gate_scale, gate_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
                up = _accumulate(
                    up, up_words, x, at, up_scale, up_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    return gate, up


@triton.jit
def code_offsets(n, depth, FORMAT: tl.constexpr):
    """Returns the offsets [N, part_inputs] of the first words of rows n [N]."""
    size: tl.constexpr = _ROWS * FORMAT.part_inputs
    row = n // _ROWS * (tl.cdiv(depth, _STEP) * FORMAT.blocks * size) + n % _ROWS * FORMAT.part_inputs
    return row[:, None] + tl.arange(0, FORMAT.part_inputs)[None, :]


@triton.jit
def row_words(depth, FORMAT: tl.constexpr):
    """Returns how many words encode a row of the weight."""
    return tl.cdiv(depth, _STEP) * FORMAT.blocks * FORMAT.part_inputs


@triton.jit
def prefetch_codes(
    codes_ptr, first_n, begin, end, depth, weight_rows, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Starts to load words of a tile's rows into the L2 cache: the first BYTES bytes for K = begin .. end - 1."""
    if BYTES:
        run = row_words(depth, FORMAT) * _ROWS
        step: tl.constexpr = FORMAT.blocks * FORMAT.part_inputs * _ROWS
        first = first_n // _ROWS * run + begin // _STEP * step
        runs = tl.cdiv(weight_rows - first_n, _ROWS)
        prefetch_to_l2(codes_ptr + first, run, runs, tl.cdiv(end - begin, _STEP) * step, BLOCK_N // _ROWS, BYTES)
