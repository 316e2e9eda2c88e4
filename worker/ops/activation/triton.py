"""Triton kernel for activate: one program computes a block of elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.activation.reference import CLAMP, GATED, PLAIN, SWIGLU_ALPHA
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.triton_common import pdl_options, start_dependent

BLOCK = 1024


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Returns silu, gelu_tanh, gelu or relu2 of x, in float32."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
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


# Triton kernel for act_and_mul. One program computes a block of one row.

_CLAMP, _SWIGLU_ALPHA = tl.constexpr(CLAMP), tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def act_times_up(gate, up, ACTIVATION: tl.constexpr):
    """Returns act(gate) * up in gate's dtype, as worker/ops/activation/reference.py defines it.

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


# Triton kernel for output_gate: one program computes a block of elements.


@triton.jit
def _output_gate_kernel(x_ptr, gate_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_dependent(PDL)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    x = tl.load(x_ptr + element, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, x * (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype), mask=mask)


def output_gate_triton(x: Tensor, gate: Tensor, *, options: GpuOptions = NO_OPTIONS) -> Tensor:
    assert x.shape == gate.shape and x.dtype == gate.dtype and x.is_contiguous() and gate.is_contiguous()
    out = torch.empty_like(x)
    _output_gate_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, gate, out, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False, **pdl_options(options)
    )
    return out
