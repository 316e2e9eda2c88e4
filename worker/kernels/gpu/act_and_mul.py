"""Triton kernel for act_and_mul: one program computes a block of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def activate(x, SILU: tl.constexpr):
    """Returns SiLU, or GELU with the tanh approximation, in x's dtype."""
    x_fp32 = x.to(tl.float32)
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), so both activations are x * sigmoid(slope)
    slope = x_fp32 if SILU else 1.5957691216057308 * (x_fp32 + 0.044715 * x_fp32 * x_fp32 * x_fp32)
    return (x_fp32 / (1.0 + tl.exp(-slope))).to(x.dtype)


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + column, activate(gate, SILU) * up, mask=mask)


def act_and_mul_triton(x: Tensor, activation: str) -> Tensor:
    tokens, width = x.shape
    assert x.is_contiguous() and width % 2 == 0 and activation in ("silu", "gelu_tanh")
    size = width // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    _act_and_mul_kernel[(tokens, triton.cdiv(size, BLOCK))](
        x, out, size, SILU=activation == "silu", BLOCK=BLOCK, enable_fp_fusion=False
    )
    return out
