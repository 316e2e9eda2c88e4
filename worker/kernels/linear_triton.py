"""The Triton kernel of linear.py: a matrix product whose bits for one row do not depend on the other rows.

Every output element is one chain of fp32 additions over K, in the same steps of BLOCK_K, whatever the number of rows:
no split of K, no tuning by shape. Few rows only narrow the tile along N, to give every multiprocessor weights to read;
the tile height never falls under 64, so that the same tensor-core instruction is used throughout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 64


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, depth, x_stride,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # neighbours in time share weights: GROUP row tiles for each column tile
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % height
    tile_n = (program % (GROUP * tiles_n)) // height
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, depth, BLOCK_K):
        inside = k < depth - begin
        x = tl.load(x_at, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if BIAS:
        total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    inside_out = (m < rows)[:, None] & (n < columns)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside_out)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, depth = x.shape
    columns = weight.shape[0]
    assert weight.shape == (columns, depth) and weight.is_contiguous() and x.stride(1) == 1 and weight.dtype == x.dtype
    assert bias is None or (bias.shape == (columns,) and bias.is_contiguous())
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block_m, block_n, warps, stages = (64, 32, 4, 4) if rows <= FEW_ROWS else (128, 128, 8, 3)
    _linear_kernel[(triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)](
        x, weight, bias if bias is not None else x, out, rows, columns, depth, x.stride(0),
        BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128 // x.element_size(),
        GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
