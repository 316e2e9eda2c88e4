"""Triton kernels for linear with a weight of four or eight bits (worker/kernels/quantized_weight.py).

The products are those of linear.py with the dequantized weight, bit for bit: K is split into the same chains, and
advances through them in the same order. A program reads codes, turns them into numbers of the tokens' format in
registers (dequantize.py), and multiplies these. Tokens keep their format.

With few tokens, reading the codes takes most of the time, and turning them into numbers nearly as long. With many
tokens, large tiles turn each code into a number once for 128 or 256 tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu import tiles
from worker.kernels.gpu.act_and_mul import activate
from worker.kernels.gpu.dequantize import Format, dequantize, widen_half
from worker.kernels.gpu.linear import load_tokens, tile_index
from worker.kernels.gpu.packed_codes import ROWS, STEP, PackedCodes
from worker.kernels.gpu.tiles import Tile, cdiv

STEP_INPUTS, TILE_ROWS = tl.constexpr(STEP), tl.constexpr(ROWS)


@triton.jit
def _load(at, mask, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=mask, other=0)


@triton.jit
def _load_words(codes_ptrs, at, mask, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the words [N, part_inputs] of block BLOCK of the STEP inputs from `at` on."""
    size: tl.constexpr = TILE_ROWS * FORMAT.part_inputs
    return _load(codes_ptrs + (at // STEP_INPUTS * FORMAT.blocks + BLOCK) * size, mask[:, None], EVEN)


@triton.jit
def _load_inputs(
    x_ptrs, at, mask, depth, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Loads the tokens' numbers [part_inputs, M] that belong to part PART of block BLOCK."""
    first: tl.constexpr = (BLOCK * FORMAT.parts + PART) * FORMAT.part_inputs
    return load_tokens(x_ptrs + at + first, mask, at + first + tl.arange(0, FORMAT.part_inputs), depth, EVEN)


@triton.jit
def _load_scale(
    scale_ptrs, minimum_ptrs, at, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Loads scale and minimum [N] of part PART of block BLOCK, as `dequantize` takes them.

    `at` is a multiple of STEP. PackedCodes says what words hold. A word with the scales of two groups is turned into
    one that holds a scale twice; both groups have the same expression for its address, so it is loaded once. Shifts
    are constants: with others, the compiler passes the weights through shared memory.
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
def _accumulate(
    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Returns acc [N, M] + weight [N, part_inputs] @ x [part_inputs, M] for part PART of the words of block BLOCK."""
    scale, minimum = _load_scale(scale_ptrs, minimum_ptrs, at, weight_rows, mask, FORMAT, EVEN, BLOCK, PART)
    weight = dequantize(words, scale, minimum, table_ptr, x.dtype, FORMAT, PART)
    return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def _accumulate_chain(
    codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, mask_n, mask_m, begin, end, depth, weight_rows,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the chain over K = begin .. end - 1 from zero: [N, M] float32. begin is a multiple of STEP."""
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(begin, end, STEP_INPUTS):
        for block in tl.static_range(blocks):
            words = _load_words(codes_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN, block, part)
                acc = _accumulate(
                    acc, words, x, at, scale_ptrs, minimum_ptrs, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    return acc


@triton.jit
def _code_offsets(n, depth, FORMAT: tl.constexpr):
    """Returns the offsets [N, part_inputs] of the first words of a tile's rows n."""
    size: tl.constexpr = TILE_ROWS * FORMAT.part_inputs
    row = n // TILE_ROWS * (tl.cdiv(depth, STEP_INPUTS) * FORMAT.blocks * size) + n % TILE_ROWS * FORMAT.part_inputs
    return row[:, None] + tl.arange(0, FORMAT.part_inputs)[None, :]


@triton.jit
def _row_words(depth, FORMAT: tl.constexpr):
    """Returns how many words encode a row of the weight."""
    return tl.cdiv(depth, STEP_INPUTS) * FORMAT.blocks * FORMAT.part_inputs


@triton.jit(do_not_specialize=["rows"])
def _quantized_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr,
    rows, columns, depth, chain, x_stride, out_stride, weight_rows,
    BIAS: tl.constexpr, MULTIPLE_CHAINS: tl.constexpr, WRITE_PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiplies BLOCK_M tokens by BLOCK_N rows of weights in each program. See _linear_kernel in linear.py.

    weight_rows: the rows of the weight with those that fill the last tile. out_stride: from a token to the next.
    """
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    loaded_n = n < weight_rows - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    codes_ptrs = codes_ptr + first_n * _row_words(depth, FORMAT) + _code_offsets(n, depth, FORMAT)
    scale_ptrs, minimum_ptrs = scale_ptr + first_n + n, minimum_ptr + first_n + n
    part = tl.program_id(1)
    begin = part * chain
    end = min(begin + chain, depth) if MULTIPLE_CHAINS else depth
    acc = _accumulate_chain(
        codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, begin, end, depth, weight_rows,
        FORMAT, EVEN, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # BIAS is a constant, `part` is not
        if part == 0:
            acc += tl.load(bias_ptr + first_n + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if MULTIPLE_CHAINS and not WRITE_PARTIALS:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            acc += _accumulate_chain(
                codes_ptrs, scale_ptrs, minimum_ptrs, table_ptr, x_ptrs, loaded_n, mask_m, begin, end, depth,
                weight_rows, FORMAT, EVEN, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    out_ptrs = out_ptr + (part * rows + first_m) * out_stride + first_n + m[None, :] * out_stride + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def _quantized_gated_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, table_ptr, bias_ptr, out_ptr,
    rows, columns, depth, x_stride, weight_rows,
    BIAS: tl.constexpr, SILU: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes act(x @ gate) * (x @ up). See _gated_linear_kernel in linear.py."""
    blocks: tl.constexpr = FORMAT.blocks
    parts: tl.constexpr = FORMAT.parts
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, FORMAT.part_inputs)
    mask_m, mask_n = m < rows - first_m, n < columns - first_n
    x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    gate_ptrs = codes_ptr + first_n * _row_words(depth, FORMAT) + _code_offsets(n, depth, FORMAT)
    up_ptrs = gate_ptrs + columns.to(tl.int64) * _row_words(depth, FORMAT)
    gate_scale, gate_minimum = scale_ptr + first_n + n, minimum_ptr + first_n + n
    up_scale, up_minimum = gate_scale + columns, gate_minimum + columns
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(0, depth, STEP_INPUTS):
        for block in tl.static_range(blocks):
            gate_words = _load_words(gate_ptrs, at, mask_n, FORMAT, EVEN, block)
            up_words = _load_words(up_ptrs, at, mask_n, FORMAT, EVEN, block)
            for part in tl.static_range(parts):
                x = _load_inputs(x_ptrs, at, mask_m, depth, FORMAT, EVEN, block, part)
                gate = _accumulate(
                    gate, gate_words, x, at, gate_scale, gate_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
                up = _accumulate(
                    up, up_words, x, at, up_scale, up_minimum, table_ptr, weight_rows, mask_n,
                    FORMAT, EVEN, block, part,
                )  # fmt: skip
    if BIAS:
        gate += tl.load(bias_ptr + first_n + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + columns + first_n + n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + first_m * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_ptrs, activate(gate.to(dtype), SILU) * up.to(dtype), mask=mask_n[:, None] & mask_m[None, :])


def quantized_linear_triton(
    x: Tensor, parts: Sequence[PackedCodes], bias: Tensor | None, *, fp32_out: bool = False, split_k: bool = False
) -> Tensor:
    """Returns x [T, K] @ weight [N, K].T + bias [N], [T, N] in x's dtype, or in float32 if `fp32_out`.

    The rows of the weight are those of `parts`, one after another. K advances in the order of the codes, which is an
    input order's if there is one. split_k: whether the result may be partial sums [S, T, N] float32 instead: see
    worker/kernels/split_k.py.
    """
    rows, depth = _check(x, parts, bias)
    columns, dtype = sum(part.shape[0] for part in parts), torch.float32 if fp32_out else x.dtype
    chain = tiles.chain_length(columns, depth)
    chains = cdiv(depth, chain)
    chosen = [_fitted(tiles.choose_tile(rows, part.shape[0], depth, x.dtype), 1, part, x) for part in parts]
    counts = [tile.count(rows, part.shape[0]) for tile, part in zip(chosen, parts, strict=True)]
    use_split_k = split_k and chains > 1 and tiles.needs_split_k(rows, sum(counts))
    shape, dtype = ((chains, rows, columns), torch.float32) if use_split_k else ((rows, columns), dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    begin = 0
    for tile, count, part in zip(chosen, counts, parts, strict=True):
        tokens = _ordered(x, part)
        _quantized_linear_kernel[(count, chains if use_split_k else 1)](
            tokens, *_operands(part), x if bias is None else bias[begin:], out[..., begin:],
            rows, part.shape[0], depth, chain, tokens.stride(0), columns, part.padded_rows,
            BIAS=bias is not None, MULTIPLE_CHAINS=chains > 1, WRITE_PARTIALS=use_split_k,
            **launch_options(tile, 1, part, x),
        )  # fmt: skip
        begin += part.shape[0]
    return out


def quantized_gated_linear_triton(x: Tensor, weight: PackedCodes, bias: Tensor | None, activation: str) -> Tensor:
    """Returns act(x @ gate) * (x @ up), [T, I], for x [T, K], weight [2 I, K] and bias [2 I].

    The rows of gate come before those of up. The bits of both products are those of `quantized_linear_triton`. The
    weight must be one that `can_be_gated`.
    """
    rows, depth = _check(x, [weight], bias)
    assert can_be_gated([weight]) and activation in ("silu", "gelu_tanh")
    columns, tokens = weight.shape[0] // 2, _ordered(x, weight)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tile = _fitted(tiles.choose_gated_tile(rows, columns, x.dtype), 2, weight, x)
    _quantized_gated_linear_kernel[(tile.count(rows, columns),)](
        tokens, *_operands(weight), x if bias is None else bias, out,
        rows, columns, depth, tokens.stride(0), weight.padded_rows, BIAS=bias is not None, SILU=activation == "silu",
        **launch_options(tile, 2, weight, x),
    )  # fmt: skip
    return out


def can_be_gated(parts: Sequence[PackedCodes]) -> bool:
    """Whether one kernel computes both products of a gated linear: one format, one chain, and whole tiles of gate."""
    columns, depth = parts[0].shape
    return len(parts) == 1 and columns % (2 * ROWS) == 0 and tiles.chain_length(columns, depth) >= depth


def _fitted(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> Tile:
    """Returns the tile with as many stages as fit in shared memory, and with fewer tokens if two stages do not fit."""
    size = stage_bytes(tile, products, weight, x)
    stages = tiles.stages_within(tile, size, x.device, shared=tile.rows <= 32)
    if stages > 1 or tile.rows <= 16:
        return replace(tile, stages=stages)
    return _fitted(replace(tile, rows=tile.rows // 2), products, weight, x)


def stage_bytes(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> int:
    """Returns the bytes of shared memory for STEP inputs of all tokens and rows of the weight that a program reads."""
    row_bytes = STEP * weight.code_map.bits // 8 + weight.scale_bytes_in_step()
    return tile.rows * STEP * x.element_size() + products * tile.columns * row_bytes


def launch_options(tile: Tile, products: int, weight: PackedCodes, x: Tensor) -> dict[str, Any]:
    """Returns constants and options of a kernel whose programs compute `products` products of the tile's size."""
    even = weight.padded_rows % (products * tile.columns) == 0 and weight.shape[1] % STEP == 0
    return {
        "FORMAT": Format.of(weight, x.dtype), "EVEN": even,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tiles.GROUP,
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False,
    }  # fmt: skip


def _operands(weight: PackedCodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
