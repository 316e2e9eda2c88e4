"""The Triton kernel of gate.py: one program computes a block of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def activated(x, SILU: tl.constexpr):
    """SiLU, or GELU by tanh, in x's dtype."""
    wide = x.to(tl.float32)
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), so both are wide * sigmoid(slope)
    slope = wide if SILU else 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1.0 + tl.exp(-slope))).to(x.dtype)


@triton.jit
def _gate_kernel(x_ptr, out_ptr, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    left = tl.load(x_ptr + row * 2 * size + column, mask=inside, other=0.0)
    right = tl.load(x_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * size + column, activated(left, SILU) * right, mask=inside)


def act_and_mul_triton(x: Tensor, activation: str) -> Tensor:
    tokens, width = x.shape
    assert x.is_contiguous() and width % 2 == 0 and activation in ("silu", "gelu_tanh")
    size = width // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    _gate_kernel[(tokens, triton.cdiv(size, BLOCK))](
        x, out, size, SILU=activation == "silu", BLOCK=BLOCK, enable_fp_fusion=False
    )
    return out
