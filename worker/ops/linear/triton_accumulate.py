"""A Triton kernel for linear with tiles so large that registers can hold only one sum of each element.

A product whose K is split into several chains needs two sums at a time: of the current chain, and of all finished
chains. With a tile of 256 x 128, there are no registers for the second sum. So the sum of the finished chains waits in
memory ("spilled"): a program stores it at the end of a chain, and adds it at the end of the next chain. Additions have
the same order as in triton.py, so the bits are the same.

Each multiprocessor runs one program, which computes one tile after another. So on an H200, the waiting sums take 17 MB,
which fit into its L2 cache of 50 MB.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.linear.triton_tiles import Tile, multiprocessors
from worker.ops.triton_common import widen


@triton.jit
def _quarters(acc):
    """Splits acc [N, M] along the tokens into four parts [N, M / 4]. The numbers stay in their registers."""
    first, second = _halves(acc)
    return _halves(first) + _halves(second)


@triton.jit
def _halves(acc):
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _spill(acc, spilled_ptr, waiting):
    """Adds acc [N, M] to the spilled sum and stores the new sum, a quarter at a time, to need few registers.

    waiting: if false, there is no spilled sum yet, and acc is stored
    """
    parts = _quarters(acc)
    for index in tl.static_range(4):
        pointers = _spilled_pointers(parts[index], spilled_ptr, index)
        total = tl.load(pointers, mask=waiting, other=-0.0) + parts[index]  # -0.0 + x has the bits of x for every x
        tl.debug_barrier()
        tl.store(pointers, total)
        tl.debug_barrier()


@triton.jit
def _spilled_pointers(part, spilled_ptr, index: tl.constexpr):
    n, m = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    return spilled_ptr + index * part.shape[0] * part.shape[1] + n[:, None] + m[None, :] * part.shape[0]


@triton.jit(do_not_specialize=["rows"])
def _spilled_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, spilled_ptr, out_ptr, rows, columns, depth, chain,
    x_stride,
    BIAS: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes the same as _linear_kernel. A program computes several tiles, each of BLOCK_M tokens and BLOCK_N rows of
    the weight.
    """
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    spilled_ptr += tl.program_id(0) * (BLOCK_M * BLOCK_N)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_index(tile, tiles_m, tiles_n, GROUP)
        first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
        mask_m, mask_n = m < rows - first_m, n < columns - first_n
        x_ptrs = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
        weight_ptrs = weight_ptr + first_n * depth + n[:, None] * depth + k[None, :]
        scale = load_scales(scale_ptr + first_n, n, mask_n, FORMAT or DYNAMIC)
        token_scale = load_scales(token_scale_ptr + first_m, m, mask_m, DYNAMIC)
        last = (tl.cdiv(depth, chain) - 1) * chain
        for begin in range(0, last, chain):
            acc = accumulate_chain(
                weight_ptrs, x_ptrs, mask_n, mask_m, begin, begin + chain, depth, scale, token_scale,
                EVEN, FORMAT, DYNAMIC, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if BIAS:
                acc += tl.where(begin == 0, load_bias(bias_ptr + first_n, n, mask_n), -0.0)
            _spill(acc, spilled_ptr, begin > 0)
        acc = accumulate_chain(
            weight_ptrs, x_ptrs, mask_n, mask_m, last, depth, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _store(acc, spilled_ptr, out_ptr + (first_m * columns + first_n), mask_n, rows - first_m, columns)


@triton.jit
def _store(acc, spilled_ptr, out_ptr, mask_n, rows, columns):
    """Adds acc [N, M] to the spilled sum, and stores the total as the result."""
    parts = _quarters(acc)
    n, m = tl.arange(0, parts[0].shape[0]), tl.arange(0, parts[0].shape[1])
    for index in tl.static_range(4):
        total = tl.load(_spilled_pointers(parts[index], spilled_ptr, index)) + parts[index]
        row = index * parts[index].shape[1] + m
        mask = mask_n[:, None] & (row < rows)[None, :]
        tl.store(out_ptr + row[None, :] * columns + n[:, None], total.to(out_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()


def launch_spilled(
    tile: Tile,
    count: int,
    operands: Sequence[Tensor],
    out: Tensor,
    sizes: tuple[int, int, int, int, int],
    constants: Mapping[str, Any],
) -> None:
    """Computes a product of `count` tiles that has several chains.

    operands: x, weight, bias, scale and token scale, as in triton.py
    sizes: rows, columns, depth, chain and stride of x, as in triton.py
    """
    programs = min(count, multiprocessors(out.device))
    spilled = torch.empty(programs * tile.rows * tile.columns, dtype=torch.float32, device=out.device)
    _spilled_linear_kernel[(programs,)](*operands, spilled, out, *sizes, **constants)


# Functions for kernels that multiply by weights of 16 or 8 bits: they compute one chain of additions for a tile.
#
# triton.py says what a chain is, and why its bits are the same in every tile.


@triton.jit
def tile_index(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Returns (tile_m, tile_n) of a program. Up to GROUP consecutive programs share a tile of weights."""
    group = program // (GROUP * tiles_n)
    group_rows = min(tiles_m - group * GROUP, GROUP)
    within = program % (GROUP * tiles_n)
    return group * GROUP + within % group_rows, within // group_rows


@triton.jit
def _load_weights(at, mask, k, depth, EVEN: tl.constexpr):
    """Loads weights [N, K]. EVEN: no tile crosses an edge of the weight, so that loads are wide and need no mask."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=mask[:, None] & (k < depth)[None, :], other=0.0)


@triton.jit
def load_tokens(at, mask, k, depth, EVEN: tl.constexpr):
    """Loads the activations of a tile's tokens, [K, M]."""
    if EVEN:
        return tl.load(at, mask=mask[None, :], other=0.0)
    return tl.load(at, mask=mask[None, :] & (k < depth)[:, None], other=0.0)


@triton.jit
def _zero_accumulator(x_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns zeros [N, M] to which products are added: int32 (exact) if tokens are int8, else float32."""
    return tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)


@triton.jit
def _accumulate(acc, weight, x, FORMAT: tl.constexpr):
    """Returns acc [N, M] + weight [N, K] @ x [K, M]."""
    if x.dtype == tl.float8e4nv:
        return acc + tl.dot(weight, x)  # the addition is separate: triton.py says why
    else:
        return tl.dot(widen(weight, x.dtype, FORMAT), x, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def accumulate_chain(
    weight_ptrs, x_ptrs, mask_n, mask_m, begin, end, depth, scale, token_scale,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the chain over K = begin .. end - 1, which starts from zero. Returns the chain multiplied by scales, [N,
    M] float32.
    """
    acc = _zero_accumulator(x_ptrs, BLOCK_M, BLOCK_N)
    for at in range(begin, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        weight = _load_weights(weight_ptrs + at, mask_n, k, depth, EVEN)
        x = load_tokens(x_ptrs + at, mask_m, k, depth, EVEN)
        acc = _accumulate(acc, weight, x, FORMAT)
    return apply_scales(acc, scale, token_scale, FORMAT, DYNAMIC)


@triton.jit
def accumulate_gated_chain(
    gate_ptrs, up_ptrs, x_ptrs, mask_n, mask_m, depth,
    EVEN: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes the chains of gate and up over all of K, for the same tokens. Returns the two chains, each [N, M],
    without scales.
    """
    gate = _zero_accumulator(x_ptrs, BLOCK_M, BLOCK_N)
    up = _zero_accumulator(x_ptrs, BLOCK_M, BLOCK_N)
    for at in range(0, depth, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = load_tokens(x_ptrs + at, mask_m, k, depth, EVEN)
        gate = _accumulate(gate, _load_weights(gate_ptrs + at, mask_n, k, depth, EVEN), x, FORMAT)
        up = _accumulate(up, _load_weights(up_ptrs + at, mask_n, k, depth, EVEN), x, FORMAT)
    return gate, up


@triton.jit
def load_scales(scale_ptr, at, mask, ANY: tl.constexpr):
    """Loads the scales of a tile's weights or tokens. ANY: if false, there are no scales, and 0 is returned."""
    return tl.load(scale_ptr + at, mask=mask, other=0.0) if ANY else 0.0


@triton.jit
def apply_scales(acc, scale, token_scale, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr):
    """Multiplies acc [N, M] in float32 by the scales [N] of weights and [M] of tokens, if these have scales."""
    if DYNAMIC:
        return acc.to(tl.float32) * scale[:, None] * token_scale[None, :]
    elif FORMAT:
        return acc * scale[:, None]
    else:
        return acc


@triton.jit
def load_bias(bias_ptr, at, mask):
    """Loads the biases of a tile's weight rows, as a column [N, 1]."""
    return tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)[:, None]
