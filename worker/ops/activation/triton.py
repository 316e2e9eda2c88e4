"""Triton kernel for activate: one program computes a block of elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.dependent_launch import pdl_options, start_dependent
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions
from worker.kernels.rowwise.activate import PLAIN

BLOCK = 1024


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Returns silu, gelu_tanh or relu2 of x, in float32."""
    if ACTIVATION == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        return positive * positive
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), so silu and gelu_tanh are both x * sigmoid(slope).
    slope = 1.5957691216057308 * (x + 0.044715 * x * x * x) if ACTIVATION == "gelu_tanh" else x
    return x / (1.0 + tl.exp(-slope))


@triton.jit
def _expm1(x):
    """Returns e^x - 1 for x <= 0. Near zero, computes the Taylor series of degree 6."""
    series = x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.125, series, tl.exp(x) - 1.0)


@triton.jit
def _xielu(x, parameters_ptr):
    alpha_p, alpha_n = tl.load(parameters_ptr), tl.load(parameters_ptr + 1)
    beta, eps = tl.load(parameters_ptr + 2), tl.load(parameters_ptr + 3)
    negative = (_expm1(tl.where(x > eps, eps, x)) - x) * alpha_n
    return tl.where(x > 0.0, alpha_p * x * x, negative) + beta * x


@triton.jit
def _activate_kernel(
    x_ptr, parameters_ptr, out_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_dependent(PDL)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)
    out = _xielu(x, parameters_ptr) if ACTIVATION == "xielu" else activated(x, ACTIVATION)
    tl.store(out_ptr + element, out.to(out_ptr.dtype.element_ty), mask=mask)


def activate_triton(
    x: Tensor, activation: str, parameters: Tensor | None = None, *, options: GpuOptions = NO_OPTIONS
) -> Tensor:
    assert x.is_contiguous() and activation in PLAIN and (parameters is not None) == (activation == "xielu")
    assert parameters is None or (parameters.shape == (4,) and parameters.dtype == torch.float32)
    out = torch.empty_like(x)
    _activate_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, x if parameters is None else parameters, out, x.numel(), ACTIVATION=activation, BLOCK=BLOCK,
        enable_fp_fusion=False, **pdl_options(options),
    )  # fmt: skip
    return out
