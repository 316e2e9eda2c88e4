"""The Triton kernel of norm.py: one program normalises one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    token_stride, heads, size, eps,
    ADD: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + (row // heads) * token_stride + (row % heads) * size + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * size + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * size + columns, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if OFFSET:
        out = normed * (1.0 + weight.to(tl.float32))
    else:
        out = normed.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + columns, out.to(x.dtype), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, offset: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, None, eps, offset)
    return out


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: bool
) -> tuple[Tensor, Tensor]:
    assert residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, offset)
    return out, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float, offset: bool
) -> None:
    size = x.shape[-1]
    assert x.ndim in (2, 3) and x.stride(-1) == 1 and weight.shape == (size,)
    assert x.ndim == 2 or x.stride(1) == size, "only whole tokens may be strided"
    block = triton.next_power_of_2(size)
    _norm_kernel[(x.numel() // size,)](
        x, residual if residual is not None else x, weight, out, total if total is not None else out,
        x.stride(0), x.shape[1] if x.ndim == 3 else 1, size, eps,
        ADD=residual is not None, OFFSET=offset, BLOCK=block, num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
