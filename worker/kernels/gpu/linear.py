"""The Triton kernels of linear.py: matrix products whose bits for one row do not depend on the other rows.

Why. K is cut at absolute positions into chains (tiles.py); each output element is one fp32 chain over each of them,
from zero, and the chains are added in order (the bias after the first). How the work is shared out never shows in the
bits: a program may compute all chains of its tile, or each chain has a program of its own and the terms are added by
whoever reads them (terms.py). Inside a chain K advances by the tensor core's own step (16 for 16-bit numbers) whatever
BLOCK_K is, zeros beyond the end add nothing, and the same instruction runs throughout: the weight's rows are always its
M side, 64 to a warp group, and the tokens its N side, where 8 to 256 lie next to each other without meeting. So tiles
may follow the row count, chains may not. All of this rests on one assumption about the hardware: that wgmma m64nNk16
(k32 for e4m3) gives an element the same bits for every N.

Why the weights stand where textbooks put the tokens. With few tokens the time is that of reading the weights. That
takes some 3 MB in flight on an H200, 24 KB a multiprocessor; here 64 rows of 64 weights are 8 KB a stage, at least six
of eight stages ahead, and two programs share a multiprocessor. The other way round 64 rows of mostly absent tokens
would fill shared memory, and its ports, at the weights' expense. It also is the side that may come from registers:
eight-bit weights (quantize.py) are widened there, and each chain is scaled by its row before it is added.

Where tokens are of eight bits, too, K advances by 32, and each chain is scaled by its tokens as well. Sums of int8 are
exact. Those of e4m3 the tensor core keeps to some 14 bits, so it begins each BLOCK_K anew, which for them is always
128, and float32 takes over the sum: at absolute positions, too, as chains are multiples of it. That needs twice the
registers, hence smaller tiles, and the tensor cores rest while a warp group adds. Triton's `max_num_imprecise_acc`
would ask for the same, but uses the sums before it waits for them, which the assembler repairs by waiting for each
instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu import tiles
from worker.kernels.gpu.act_and_mul import activated
from worker.kernels.gpu.quantize import CODES, quantize_tokens_triton, widen


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
def _nothing(x_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[N, M] zeros in which products of such tokens are added: exact where they are int8."""
    return tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32)


@triton.jit
def _more(total, weight, x, FORMAT: tl.constexpr):
    """total [N, M] + weight [N, K] @ x [K, M]."""
    if x.dtype == tl.float8e4nv:
        return total + tl.dot(weight, x)  # as two additions: see above
    else:
        return tl.dot(widen(weight, x.dtype, FORMAT), x, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _chain(
    weight_at, x_at, real_n, real_m, begin, end, depth, scale, token_scale,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[N, M] in float32 over K = begin .. end - 1, from zero, scaled."""
    total = _nothing(x_at, BLOCK_M, BLOCK_N)
    for at in range(begin, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        weight = _load_weights(weight_at + at, real_n, k, depth, EVEN)
        x = _load_tokens(x_at + at, real_m, k, depth, EVEN)
        total = _more(total, weight, x, FORMAT)
    return _scaled(total, scale, token_scale, FORMAT, DYNAMIC)


@triton.jit
def _scales(scale_ptr, at, real, ANY: tl.constexpr):
    """Of a tile's weights or tokens; anything where they have none."""
    return tl.load(scale_ptr + at, mask=real, other=0.0) if ANY else 0.0


@triton.jit
def _scaled(total, scale, token_scale, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr):
    """[N, M] in float32, times the scales [N] of weights and [M] of tokens, as far as they have any."""
    if DYNAMIC:
        return total.to(tl.float32) * scale[:, None] * token_scale[None, :]
    elif FORMAT:
        return total * scale[:, None]
    else:
        return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, rows, columns, depth, chain, x_stride,
    BIAS: tl.constexpr, CUT: tl.constexpr, SPREAD: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
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
    scale = _scales(scale_ptr + first_n, n, real_n, FORMAT or DYNAMIC)
    token_scale = _scales(token_scale_ptr + first_m, m, real_m, DYNAMIC)
    total = _chain(
        weight_at, x_at, real_n, real_m, begin, end, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # known when compiling; the next only when running
        if part == 0:
            total += tl.load(bias_ptr + first_n + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    if CUT and not SPREAD:
        for begin in range(chain, depth, chain):
            end = min(begin + chain, depth)
            total += _chain(
                weight_at, x_at, real_n, real_m, begin, end, depth, scale, token_scale, EVEN, FORMAT, DYNAMIC,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    out_at = out_ptr + (part * rows + first_m) * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, token_scale_ptr, out_ptr, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr,
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
    gate = _nothing(x_ptr, BLOCK_M, BLOCK_N)
    up = _nothing(x_ptr, BLOCK_M, BLOCK_N)
    for at in range(0, depth, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        x = _load_tokens(x_at + at, real_m, k, depth, EVEN)
        gate = _more(gate, _load_weights(gate_at + at, real_n, k, depth, EVEN), x, FORMAT)
        up = _more(up, _load_weights(up_at + at, real_n, k, depth, EVEN), x, FORMAT)
    token_scale = _scales(token_scale_ptr + first_m, m, real_m, DYNAMIC)
    gate_scale = _scales(scale_ptr + first_n, n, real_n, FORMAT or DYNAMIC)
    up_scale = _scales(scale_ptr + columns + first_n, n, real_n, FORMAT or DYNAMIC)
    gate = _scaled(gate, gate_scale, token_scale, FORMAT, DYNAMIC)
    up = _scaled(up, up_scale, token_scale, FORMAT, DYNAMIC)
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
    dynamic: bool = False,
    fp32_out: bool = False,
    split_k: bool = False,
) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in x's dtype, or float32 if `fp32_out`.

    With a `scale` [N] the weight is of int8 or float8_e4m3fn; if `dynamic`, the tokens become of that format, too.
    With `split_k` perhaps [S, T, N] float32 instead: see split_k.py.
    """
    columns, dtype = weight.shape[0], torch.float32 if fp32_out else x.dtype
    rows, depth = _check(x, weight, bias, scale, columns)
    x, token_scale = quantize_tokens_triton(x, weight.dtype) if dynamic else (x, None)
    chain = tiles.chain_length(columns, depth)
    chains = tiles.cdiv(depth, chain)
    tile = tiles.choose_tile(rows, columns, depth, x.dtype)
    count = tile.count(rows, columns)
    spread = split_k and chains > 1 and count < (tiles.PROCESSORS if rows <= 64 else tiles.PROCESSORS // 2)
    shape, dtype = ((chains, rows, columns), torch.float32) if spread else ((rows, columns), dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _linear_kernel[(count, chains if spread else 1)](
        x, _stored(weight, dynamic), *(x if one is None else one for one in (bias, scale, token_scale)), out,
        rows, columns, depth, chain, x.stride(0), BIAS=bias is not None, CUT=chains > 1, SPREAD=spread,
        num_warps=tile.warps, num_stages=tiles.stages_of(tile, tile.columns, x, weight), enable_fp_fusion=False,
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


def gated_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    scale: Tensor | None = None,
    *,
    dynamic: bool = False,
) -> Tensor:
    """x [T, K], weight [2 I, K], gate above up, bias and scale [2 I] -> act(x @ gate) * (x @ up) [T, I].

    The bits of the two products are those of `linear_triton`; the weight must be one that it does not cut.
    """
    columns = weight.shape[0] // 2
    rows, depth = _check(x, weight, bias, scale, 2 * columns)
    assert tiles.uncut(weight) and activation in ("silu", "gelu_tanh")
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    x, token_scale = quantize_tokens_triton(x, weight.dtype) if dynamic else (x, None)
    tile = tiles.choose_gated_tile(rows, columns, x.dtype)
    _gated_kernel[(tile.count(rows, columns),)](
        x, _stored(weight, dynamic), *(x if one is None else one for one in (bias, scale, token_scale)), out,
        rows, columns, depth, x.stride(0), BIAS=bias is not None, SILU=activation == "silu",
        num_warps=tile.warps, num_stages=tiles.stages_of(tile, 2 * tile.columns, x, weight), enable_fp_fusion=False,
        **tiles.tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


def _stored(weight: Tensor, dynamic: bool) -> Tensor:
    """As the kernels take it: float8 as bytes where they are widened to the tokens' format."""
    return weight.view(torch.int8) if weight.dtype.itemsize == 1 and not dynamic else weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, columns: int) -> tuple[int, int]:
    rows, depth = x.shape
    assert weight.shape == (columns, depth) and weight.is_contiguous()
    assert weight.dtype == x.dtype if scale is None else weight.dtype in CODES
    assert scale is None or (scale.shape == (columns,) and scale.is_contiguous() and scale.dtype == torch.float32)
    assert rows and (x.stride(1) == 1 or depth == 1)
    assert rows == 1 or x.stride(0) <= 1 << 23  # of a tile's 256 rows 32 bits count the elements
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    return rows, depth
