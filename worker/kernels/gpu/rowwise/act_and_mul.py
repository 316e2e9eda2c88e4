"""Triton kernel for act_and_mul. One program computes a block of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.dependent_launch import pdl_options, start_dependent
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions
from worker.kernels.gpu.rowwise.activate import activated
from worker.kernels.rowwise.act_and_mul import CLAMP, SWIGLU_ALPHA
from worker.kernels.rowwise.activate import GATED

BLOCK = 1024
_CLAMP, _SWIGLU_ALPHA = tl.constexpr(CLAMP), tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def act_times_up(gate, up, ACTIVATION: tl.constexpr):
    """Returns act(gate) * up in gate's dtype, as worker/kernels/rowwise/act_and_mul.py defines it.

    The activation is rounded to the dtype before the multiplication.
    """
    x = gate.to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        x = tl.where(x > _CLAMP, _CLAMP, x)  # NaN stays NaN
        up_fp32 = up.to(tl.float32)
        up_fp32 = tl.where(up_fp32 > _CLAMP, _CLAMP, tl.where(up_fp32 < -_CLAMP, -_CLAMP, up_fp32))
        up = (up_fp32 + 1.0).to(up.dtype)
        slope = _SWIGLU_ALPHA * x
        return (x / (1.0 + tl.exp(-slope))).to(gate.dtype) * up
    return activated(x, ACTIVATION).to(gate.dtype) * up


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + column, act_times_up(gate, up, ACTIVATION), mask=mask)


def act_and_mul_triton(x: Tensor, activation: str, *, options: GpuOptions = NO_OPTIONS) -> Tensor:
    tokens, width = x.shape
    assert x.is_contiguous() and width % 2 == 0 and activation in GATED
    size = width // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    _act_and_mul_kernel[(tokens, triton.cdiv(size, BLOCK))](
        x, out, size, ACTIVATION=activation, BLOCK=BLOCK, enable_fp_fusion=False, **pdl_options(options)
    )
    return out
