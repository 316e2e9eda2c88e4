"""The Triton kernels of linear.py: matrix products whose bits for one row do not depend on the other rows.

Why. K is cut at absolute positions into chains of `chain_length(N, K)`; each output element is one fp32 chain over
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

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gate_triton import activated
from worker.kernels.quantize_triton import FORMATS, widen

PROCESSORS = 132  # of the GPU the tiles are made for; on another the bits are the same
CHAIN_STEP, MIN_CHAIN, MAX_CHAINS = 128, 256, 8
GROUP = 8


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


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is shared out. No field may show in the bits."""

    rows: int  # tokens
    columns: int  # of the product; rows of the weight
    warps: int
    stages: int

    def count(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)

    def busiest(self, rows: int, columns: int) -> int:
        """Elements that the multiprocessor with most programs computes."""
        return cdiv(self.count(rows, columns), PROCESSORS) * self.rows * self.columns


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv takes twenty times as long."""
    return -(-a // b)


@lru_cache(maxsize=4096)
def chain_length(columns: int, depth: int) -> int:
    """Where K is cut: so that a narrow product of few rows still has a program for every multiprocessor.

    Of the weight's shape and nothing else.
    """
    chains = min(cdiv(PROCESSORS + 12, cdiv(columns, 64)), MAX_CHAINS, max(1, depth // MIN_CHAIN))
    return cdiv(cdiv(depth, chains), CHAIN_STEP) * CHAIN_STEP


@lru_cache(maxsize=4096)
def choose_tile(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """Few rows: many small programs, two or three to a multiprocessor. Many: what keeps the tensor cores busy."""
    chains = cdiv(depth, chain_length(columns, depth))
    if dtype == torch.float32:  # not for the tensor cores
        return Tile(16 if rows <= 16 else 64, 64, 4, 3)
    if rows <= 32:
        fits = cdiv(columns, 64) * chains <= 2 * PROCESSORS
        return Tile(16 if rows <= 16 else 32, 64, 4, 8 if fits else 6)
    if rows <= 64:  # by now reading the tokens once for each tile costs as much as the weights
        wide = cdiv(columns, 128) * chains >= 96
        return Tile(64, 128, 4, 4) if wide else Tile(64, 64, 4, 6)
    large = Tile(256, 128, 8, 4)
    plain = chains == 1 and columns % 128 == depth % 64 == 0  # leaves the registers for it
    fills = rows > 128 and large.count(rows, columns) >= 2 * PROCESSORS
    return large if plain and fills else Tile(128, 128, 8, 4)


@lru_cache(maxsize=4096)
def choose_gated_tile(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """Each of gate and up has `columns`."""
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 4, 3)
    if rows <= 32:
        return Tile(16, 64, 4, 6) if rows <= 16 else Tile(32, 64, 4, 5)
    if rows <= 64:
        return Tile(64, 64, 4, 4)
    large, small = Tile(128, 128, 8, 4), Tile(128, 64, 4, 3)
    return large if large.busiest(rows, columns) <= 1.25 * small.busiest(rows, columns) else small


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
    chain = chain_length(columns, depth)
    chains = cdiv(depth, chain)
    tile = choose_tile(rows, columns, depth, x.dtype)
    count = tile.count(rows, columns)
    spread = terms and chains > 1 and count < (PROCESSORS if rows <= 64 else PROCESSORS // 2)
    dtype = torch.float32 if wide or spread else x.dtype
    out = torch.empty((chains, rows, columns) if spread else (rows, columns), dtype=dtype, device=x.device)
    _linear_kernel[(count, chains if spread else 1)](
        x, _bytes(weight), bias if bias is not None else x, scale if scale is not None else x, out,
        rows, columns, depth, chain, x.stride(0), BIAS=bias is not None, CUT=chains > 1, SPREAD=spread,
        num_warps=tile.warps, num_stages=_stages(tile, tile.columns, x, weight), enable_fp_fusion=False,
        **tile_constants(tile, columns, depth, x.dtype, weight.dtype),
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
    assert uncut(weight) and activation in ("silu", "gelu_tanh")
    tile = choose_gated_tile(rows, columns, x.dtype)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _gated_kernel[(tile.count(rows, columns),)](
        x, _bytes(weight), bias if bias is not None else x, scale if scale is not None else x, out,
        rows, columns, depth, x.stride(0), BIAS=bias is not None, SILU=activation == "silu",
        num_warps=tile.warps, num_stages=_stages(tile, 2 * tile.columns, x, weight), enable_fp_fusion=False,
        **tile_constants(tile, columns, depth, x.dtype, weight.dtype),
    )  # fmt: skip
    return out


def tile_constants(
    tile: Tile, columns: int, depth: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> dict[str, int]:
    """The tile as the kernels' constants, for tokens of `dtype` and weights that are `stored` otherwise, if so."""
    block_k = _step(tile, dtype, stored or dtype)
    even = columns % tile.columns == 0 and depth % block_k == 0
    return {
        "EVEN": even, "FORMAT": FORMATS.get(stored or dtype, 0), "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
        "BLOCK_K": block_k, "GROUP": GROUP,
    }  # fmt: skip


def _step(tile: Tile, dtype: torch.dtype, stored: torch.dtype) -> int:
    """Numbers of a row in a stage: a line of 128 bytes, of a weight if tokens are few, or else of a token."""
    few = tile.rows <= 64 and dtype.itemsize == 2
    return 128 // (stored if few else dtype).itemsize


def uncut(weight: Tensor) -> bool:
    """Whether each element of a product with weight [N, K] is a single chain."""
    return chain_length(*weight.shape) >= weight.shape[1]


def _bytes(weight: Tensor) -> Tensor:
    """float8 as the kernels take it."""
    return weight.view(torch.int8) if weight.dtype.itemsize == 1 else weight


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, columns: int) -> tuple[int, int]:
    rows, depth = x.shape
    assert weight.shape == (columns, depth) and weight.is_contiguous()
    assert weight.dtype == x.dtype if scale is None else weight.dtype in FORMATS
    assert scale is None or (scale.shape == (columns,) and scale.is_contiguous() and scale.dtype == torch.float32)
    assert rows and (x.stride(1) == 1 or depth == 1)
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    return rows, depth


def _stages(tile: Tile, columns: int, x: Tensor, weight: Tensor) -> int:
    """As many of the tile's as this device has shared memory for; `columns` rows of weights are in each."""
    step = _step(tile, x.dtype, weight.dtype)
    stage = (tile.rows * x.element_size() + columns * weight.element_size()) * step
    shared = _shared_memory(x.device) // (2 if tile.rows <= 32 and step > 64 else 1)  # longer steps, of two programs
    return max(1, min(tile.stages, shared // stage))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
