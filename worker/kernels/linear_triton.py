"""The Triton kernels of linear.py: matrix products whose bits for one row do not depend on the other rows.

Why. K is cut at absolute positions into chains (tiles.py); each output element is one fp32 chain over
each of them, from zero, and the chains are added in order (the bias after the first). How the work is shared out never
shows in the bits: a program may compute all chains of its tile, or each chain has a program of its own and the
terms are added by whoever reads them (terms.py). Inside a chain K advances by the tensor core's own step (16 for
16-bit numbers) whatever BLOCK_K is, zeros beyond the end add nothing, and the same instruction runs throughout: the
weight's rows are always its M side, 64 to a warp group, and the tokens its N side, where 8 to 256 lie next to each
other without meeting. So tiles may follow the row count, chains may not. All of this rests on one assumption about the
hardware: that wgmma m64nNk16 gives an element the same bits for every N.

Why the weights stand where textbooks put the tokens. With few tokens the time is that of reading the weights. That
takes some 3 MB in flight on an H200, 24 KB a multiprocessor; here 64 rows of 64 weights are 8 KB a stage, at least six
of eight stages ahead, and two programs share a multiprocessor. The other way round 64 rows of mostly absent tokens
would fill shared memory, and its ports, at the weights' expense. It also is the side that may come from registers:
eight-bit weights (quantize.py) are widened there, and each chain is scaled by its row before it is added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels import tiles
from worker.kernels.gate_triton import activated
from worker.kernels.quantize_triton import FORMATS, widen


@triton.jit
def _tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Neighbours in time share weights: GROUP tiles of tokens for each tile of weights. (tile_m, tile_n)"""
    group = program // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    within = program % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@triton.jit
def _load_weights(at, real, k, depth, EVEN: tl.constexpr):
    """[N, K]; EVEN: no tile crosses an edge of the weight, so nothing stands in the way of wide loads."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=real[:, None] & (k < depth)[None, :], other=0.0)


@triton.jit
def _load_tokens(at, real, k, depth, EVEN: tl.constexpr):
    """[K, M]"""
    if EVEN:
        return tl.load(at, mask=real[None, :], other=0.0)
    return tl.load(at, mask=real[None, :] & (k < depth)[:, None], other=0.0)


@triton.jit
def _chain(
    weight_at, x_at, real_n, real_m, begin, end, depth, scale,
    EVEN: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[N, M] over K = begin .. end - 1, from zero; where the weight has a FORMAT, times scale [N]."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        weight = _load_weights(weight_at + at, real_n, k, depth, EVEN)
        x = _load_tokens(x_at + at, real_m, k, depth, EVEN)
        total = tl.dot(widen(weight, dtype, FORMAT), x, total, input_precision="ieee")
    return total * scale[:, None] if FORMAT else total


@triton.jit
def _scales(scale_ptr, n, real, FORMAT: tl.constexpr):
    """[N]; anything where the weight has no FORMAT."""
    return tl.load(scale_ptr + n, mask=real, other=0.0) if FORMAT else 0.0


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr, rows, columns, depth, chain, x_stride,
    BIAS: tl.constexpr, CUT: tl.constexpr, SPREAD: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens times BLOCK_N rows of weights. CUT: in several chains; SPREAD: of which this is one,
    left as float32 at entry program_id(1) of out."""
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)  # within the tile: 32 bits will do
    real_m, real_n = m < rows - first_m, n < columns - first_n
    x_at = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    weight_at = weight_ptr + first_n * depth + n[:, None] * depth + k[None, :]
    part = tl.program_id(1)
    begin = part * chain
    end = min(begin + chain, depth) if CUT else depth
    scale = _scales(scale_ptr + first_n, n, real_n, FORMAT)
    total = _chain(weight_at, x_at, real_n, real_m, begin, end, depth, scale, EVEN, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K)
    if BIAS:  # noqa: SIM102  # known when compiling; the next only when running
        if part == 0:
            total += tl.load(bias_ptr + first_n + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    if CUT and not SPREAD:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            total += _chain(
                weight_at, x_at, real_n, real_m, begin, end, depth, scale, EVEN, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K
            )
    out_at = out_ptr + (part * rows + first_m) * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """act(x @ gate) * (x @ up), where up's rows of the weight come `columns` after gate's, with gate.py's roundings."""
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    first_m, first_n = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)  # within the tile: 32 bits will do
    real_m, real_n = m < rows - first_m, n < columns - first_n
    x_at = x_ptr + first_m * x_stride + m[None, :] * x_stride + k[:, None]
    gate_at = weight_ptr + first_n * depth + n[:, None] * depth + k[None, :]
    up_at = gate_at + columns.to(tl.int64) * depth
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for at in range(0, depth, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = _load_tokens(x_at + at, real_m, k, depth, EVEN)
        gate_weight = widen(_load_weights(gate_at + at, real_n, k, depth, EVEN), dtype, FORMAT)
        up_weight = widen(_load_weights(up_at + at, real_n, k, depth, EVEN), dtype, FORMAT)
        gate = tl.dot(gate_weight, x, gate, input_precision="ieee")
        up = tl.dot(up_weight, x, up, input_precision="ieee")
    if FORMAT:
        gate *= _scales(scale_ptr + first_n, n, real_n, FORMAT)[:, None]
        up *= _scales(scale_ptr + columns + first_n, n, real_n, FORMAT)[:, None]
    if BIAS:
        gate += tl.load(bias_ptr + first_n + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + columns + first_n + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + first_m * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_at, activated(gate.to(dtype), SILU) * up.to(dtype), mask=real_n[:, None] & real_m[None, :])


def linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    *,
    wide: bool = False,
    terms: bool = False,
) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in x's dtype, or float32 if `wide`.

    With a `scale` [N] the weight is of int8 or float8_e4m3fn. With `terms` perhaps [S, T, N] float32 instead: see
    terms.py.
    """
    columns = weight.shape[0]
    rows, depth = _check(x, weight, bias, scale, columns)
    chain = tiles.chain_length(columns, depth)
    chains = tiles.cdiv(depth, chain)
    tile = tiles.choose_tile(rows, columns, depth, x.dtype)
    count = tile.count(rows, columns)
    spread = terms and chains > 1 and count < (tiles.PROCESSORS if rows <= 64 else tiles.PROCESSORS // 2)
    dtype = torch.float32 if wide or spread else x.dtype
    out = torch.empty((chains, rows, columns) if spread else (rows, columns), dtype=dtype, device=x.device)
    _linear_kernel[(count, chains if spread else 1)](
        x, _bytes(weight), bias if bias is not None else x, scale if scale is not None else x, out,
        rows, columns, depth, chain, x.stride(0), BIAS=bias is not None, CUT=chains > 1, SPREAD=spread,
        num_warps=tile.warps, num_stages=tiles.stages_of(tile, tile.columns, x, weight), enable_fp_fusion=False,
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


def gated_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, scale: Tensor | None = None
) -> Tensor:
    """x [T, K], weight [2 I, K], gate above up, bias and scale [2 I] -> act(x @ gate) * (x @ up) [T, I].

    The bits of the two products are those of `linear_triton`; the weight must be one that it does not cut.
    """
    columns = weight.shape[0] // 2
    rows, depth = _check(x, weight, bias, scale, 2 * columns)
    assert tiles.uncut(weight) and activation in ("silu", "gelu_tanh")
    tile = tiles.choose_gated_tile(rows, columns, x.dtype)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _gated_kernel[(tile.count(rows, columns),)](
        x, _bytes(weight), bias if bias is not None else x, scale if scale is not None else x, out,
        rows, columns, depth, x.stride(0), BIAS=bias is not None, SILU=activation == "silu",
        num_warps=tile.warps, num_stages=tiles.stages_of(tile, 2 * tile.columns, x, weight), enable_fp_fusion=False,
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


def _bytes(weight: Tensor) -> Tensor:
    """float8 as the kernels take it."""
    return weight.view(torch.int8) if weight.dtype.itemsize == 1 else weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, columns: int) -> tuple[int, int]:
    rows, depth = x.shape
    assert weight.shape == (columns, depth) and weight.is_contiguous()
    assert weight.dtype == x.dtype if scale is None else weight.dtype in FORMATS
    assert scale is None or (scale.shape == (columns,) and scale.is_contiguous() and scale.dtype == torch.float32)
    assert rows and (x.stride(1) == 1 or depth == 1)
    assert rows == 1 or x.stride(0) <= 1 << 23  # of a tile's 256 rows 32 bits count the elements
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    return rows, depth
