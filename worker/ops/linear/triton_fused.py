"""A Triton kernel for linear_add_norm: a product of few rows, whose last program adds the residual and norms the sum.

A program stores its partial sums (worker/ops/triton_common.py), and counts itself in `arrivals`. The last program,
which finds all other programs counted, reads all partial sums from the L2 cache and computes the norm like the kernel
of worker/ops/norm/triton.py. It also sets the counter back for the next launch.

The bits are the same as with two kernels. A norm adds the squares of a row in an order that depends on the number of
warps, so this kernel has as many warps as the kernel of worker/ops/norm/triton.py. The last program computes one row
after another, so this kernel is used only for few rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.launch_options import GpuOptions
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.triton_accumulate import accumulate_chain, load_bias
from worker.ops.linear.triton_tiles import Tile, cdiv
from worker.ops.norm.triton import add_norm_row, norm_options, norm_warps
from worker.ops.triton_common import FEW_ROWS, launch_dependents, prefetch_to_l2, product_options, wait_for_kernels

MAX_ROWS = 2


@triton.jit(do_not_specialize=["rows"])
def _linear_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, partials_ptr, arrivals_ptr, x_norm_ptr, residual_ptr, norm_ptr, out_ptr, sum_ptr,
    rows, columns, depth, chain, x_stride, eps, residual_scale,
    BIAS: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr, DYNAMIC: tl.constexpr, CHAINS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    X_NORM: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Computes a product and the norm after it, as _linear_kernel and _rms_norm_kernel. Program (i, j) computes chain j
    of BLOCK_N columns for all rows.
    """
    launch_dependents(PDL)
    first_n, part = tl.program_id(0).to(tl.int64) * BLOCK_N, tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mask_m, mask_n = m < rows, n < columns - first_n
    begin = part * chain
    end = min(begin + chain, depth)
    prefetch_to_l2(weight_ptr + first_n * depth + begin, depth, columns - first_n, end - begin, BLOCK_N, PREFETCH)
    wait_for_kernels(PDL)
    acc = accumulate_chain(
        weight_ptr + first_n * depth + n[:, None] * depth + k[None, :], x_ptr + m[None, :] * x_stride + k[:, None],
        mask_n, mask_m, begin, end, depth, 0.0, 0.0, EVEN, FORMAT, DYNAMIC, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIAS:  # noqa: SIM102  # BIAS is a constant, `part` is not
        if part == 0:
            acc += load_bias(bias_ptr + first_n, n, mask_n)
    at = partials_ptr + part * rows * columns + first_n + m[None, :] * columns + n[:, None]
    tl.store(at, acc, mask=mask_n[:, None] & mask_m[None, :])
    tl.debug_barrier()  # all threads must have stored before the program is counted
    programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.atomic_xchg(arrivals_ptr, 0)
        for row in range(rows):
            add_norm_row(
                partials_ptr + row * columns, x_norm_ptr, residual_ptr, norm_ptr, out_ptr, sum_ptr, row,
                rows * columns, columns, eps, residual_scale, CHAINS, X_NORM, True, NORM, OFFSET, LAYER, BLOCK, ".cg",
            )  # fmt: skip


def can_add_norm(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel can compute this product, which must have few rows and be computed as partial sums."""
    if len(x) > MAX_ROWS or x.dtype != weight.dtype or tiles.is_single_chain(weight):
        return False
    tile = norm_tile(x, weight)
    return tiles.needs_split_k(len(x), tile.count(len(x), len(weight)), tile)


def norm_tile(x: Tensor, weight: Tensor) -> Tile:
    """Returns the tile of the product: the usual tile, but with at least 16 tokens for every four warps."""
    tile = tiles.choose_tile(len(x), *weight.shape, x.dtype, tiles.kind_of(x.device, plain=True))
    return replace(tile, rows=max(tile.rows, 4 * norm_warps(len(weight))))


def linear_add_norm_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor | None,
    eps: float,
    *,
    offset: bool,
    x_norm: Tensor | None,
    scale: float,
    options: GpuOptions,
) -> tuple[Tensor, Tensor]:
    """Returns the same bits as add_rms_norm_triton(linear_triton(x, weight, bias, split_k=True), residual, norm, ...).

    Allowed only if can_add_norm(x, weight). options: must have `arrivals`
    """
    rows, (columns, depth) = len(x), weight.shape
    assert options.arrivals is not None and residual.shape == (rows, columns) and residual.is_contiguous()
    chain = tiles.chain_length(columns, depth)
    chains = cdiv(depth, chain)
    tile = norm_tile(x, weight)
    partials = torch.empty(chains, rows, columns, dtype=torch.float32, device=x.device)
    total = torch.empty_like(residual)
    out = total if norm is None else torch.empty_like(residual)
    constants: dict[str, Any] = tiles.tile_constants(tile, columns, depth, x.dtype) | norm_options(
        columns, norm, x_norm, offset=offset
    )
    del constants["GROUP"]
    _linear_norm_kernel[(cdiv(columns, tile.columns), chains)](
        x, weight, x if bias is None else bias, partials, options.arrivals, out if x_norm is None else x_norm,
        residual, out if norm is None else norm, out, total,
        rows, columns, depth, chain, x.stride(0), eps, scale,
        BIAS=bias is not None, CHAINS=chains, num_stages=tiles.stages_that_fit(tile, tile.columns, x, weight),
        **constants, **product_options(options, tile.rows),
    )  # fmt: skip
    return out, total


# Loads the weights of the next products into the L2 cache while attention runs.
#
# In a decode, attention leaves most of the memory's bandwidth unused: a few programs read a few megabytes. So kernels
# that only prefetch run at the same time, on a second stream, which becomes a second branch of a CUDA graph. The kernel
# after attention waits for the two branches. Without a graph, the additional launches cost the host more time than the
# device gains.

PROGRAM_BYTES = 64 << 10
CACHE_BYTES = 30 << 20  # about half the L2 cache of an H200: the other half is left for attention's own data


@triton.jit
def _prefetch_kernel(ptr, size, BYTES: tl.constexpr):
    """Prefetches `size` elements at ptr. Each program prefetches BYTES bytes of them."""
    elements: tl.constexpr = BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
    first = tl.program_id(0).to(tl.int64) * elements
    prefetch_to_l2(ptr + first, 0, 1, size - first, 1, BYTES)


@contextmanager
def prefetching(rows: int, weights: Sequence[Tensor], options: GpuOptions) -> Iterator[None]:
    """Prefetches weights while the kernels that are launched inside this context run, if the step has few rows.

    rows: how many rows the step has; weights: contiguous tensors, in the order in which they will be read
    """
    beside = options.branch
    if beside is None or rows > FEW_ROWS:
        yield
        return
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for weight, size in first_bytes(weights, CACHE_BYTES):
            _prefetch_kernel[(triton.cdiv(size, PROGRAM_BYTES),)](weight, weight.numel(), BYTES=PROGRAM_BYTES)
    yield
    torch.cuda.current_stream().wait_stream(beside)


def first_bytes(weights: Sequence[Tensor], most: int) -> Iterator[tuple[Tensor, int]]:
    """Yields the weights that contain some of the first `most` bytes of all weights, each with the number of these
    bytes.
    """
    for weight in weights:
        if most > 0:
            yield weight, min(weight.nbytes, most)
        most -= weight.nbytes
