"""Functions for kernels that multiply by weights of 16 or 8 bits: they compute one chain of additions for a tile.

linear.py says what a chain is, and why its bits are the same in every tile.
"""

import triton
import triton.language as tl

from worker.kernels.gpu.rowwise.quantize import widen


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
        return acc + tl.dot(weight, x)  # the addition is separate: linear.py says why
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
