"""Converts numbers from and to eight bits in Triton kernels.

Weights of eight bits are converted exactly, in registers, right before a matrix product. Tokens are quantized to eight
bits by a kernel of their own before a product.

int8 and e4m3 values are exact in bfloat16 and float16, so products are as worker/kernels/weights/quantize.py defines
them. A cast would use conversion instructions, for which a multiprocessor has few units. This code takes two to three
plain instructions per number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.compiled import COMPILED
from worker.kernels.weights.quantize import KINDS, LARGEST

# the value of FORMAT in kernels; 0 means that numbers are not quantized
FORMAT_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}

# These assembly programs convert two bytes to one register with two numbers, because a thread loads two numbers at a
# time for the tensor core. The instruction prmt moves each byte to its own half of the register.
_INT8_BF16 = tl.constexpr("""{
    .reg .b32 pair, low, sign, less;  // 128 + the low seven bits, less 128 or, with the sign bit, 256
    mov.b32 less, 0xbf80bf80;
    cvt.u32.u16 pair, $1;
    prmt.b32 pair, pair, 0, 0x4140;
    lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, less, low;
}""")
_INT8_F16 = tl.constexpr("""{
    .reg .b32 pair, less;  // 1024 + (value + 128), less 1152
    mov.b32 less, 0xe480e480;
    cvt.u32.u16 pair, $1;
    xor.b32 pair, pair, 0x8080;
    prmt.b32 pair, pair, 0x64646464, 0x4140;
    add.rn.f16x2 $0, pair, less;
}""")
_FP8_BF16 = tl.constexpr("""{
    .reg .b32 pair, rest, bias, zero;  // exponent and mantissa into their places, then times 2^120 for the other bias
    mov.b32 bias, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 pair, $1;
    prmt.b32 pair, pair, 0, 0x1404;
    shr.u32 rest, pair, 4;
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 pair, pair, 0x80008000, rest, 0xea;
    fma.rn.bf16x2 $0, pair, bias, zero;
}""")
_FP8_F16 = tl.constexpr("""{
    .reg .b32 pair, rest, bias, zero;  // the same, times 2^8
    mov.b32 bias, 0x5c005c00;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 pair, $1;
    prmt.b32 pair, pair, 0, 0x1404;
    shr.u32 rest, pair, 1;
    and.b32 rest, rest, 0x3f803f80;
    lop3.b32 pair, pair, 0x80008000, rest, 0xea;
    fma.rn.f16x2 $0, pair, bias, zero;
}""")


@triton.jit
def widen(raw, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Converts bytes (int8) exactly to the numbers that they encode. FORMAT: their format (see FORMAT_CODES)"""
    if FORMAT == 0:
        return raw
    elif COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_INT8_BF16 if FORMAT == 1 else _FP8_BF16, "=r,h", [raw], tl.bfloat16, True, 2)
    elif COMPILED and dtype == tl.float16:
        return tl.inline_asm_elementwise(_INT8_F16 if FORMAT == 1 else _FP8_F16, "=r,h", [raw], tl.float16, True, 2)
    elif FORMAT == 1:
        return raw.to(dtype)
    else:  # The bits of e4m3 are moved to the upper bits of a float32, whose exponent bias is greater by 120.
        bits = raw.to(tl.int32)
        bits_fp32 = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return (bits_fp32.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def round_to(scaled, dtype: tl.constexpr):
    """Rounds numbers to nearest even in `dtype`, int8 or float8e4nv. The numbers must be in the range of `dtype`."""
    if dtype == tl.int8:
        return ((scaled + 12582912.0) - 12582912.0).to(dtype)  # At 1.5 * 2^23, float32 numbers are 1 apart.
    if not COMPILED:  # The interpreter's cast does not round, so this rounds to 3 bits of mantissa, or steps of 2^-9.
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        whole = tl.maximum(power, 0.015625) * 1572864.0  # At power * 1.5 * 2^20, float32 numbers are power / 8 apart.
        scaled = (scaled + whole) - whole
    return scaled.to(dtype)


@triton.jit
def _quantize_tokens_kernel(x_ptr, out_ptr, scale_ptr, size, stride, LARGEST_VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Quantizes tokens. Each program quantizes one token."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=0)
    scale = tl.maximum(tl.math.div_rn(largest, LARGEST_VALUE), 1.1754943508222875e-38)
    scaled = tl.minimum(tl.maximum(x * tl.math.div_rn(1.0, scale), -LARGEST_VALUE), LARGEST_VALUE)
    tl.store(out_ptr + row * size + columns, round_to(scaled, out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_tokens_triton(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes the same as `quantize_tokens` in worker/kernels/weights/quantize.py: values [T, K], scale [T]."""
    rows, size = x.shape
    assert rows and (x.stride(1) == 1 or size == 1)
    out, scale = torch.empty(rows, size, dtype=format, device=x.device), torch.empty(rows, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens_kernel[(rows,)](
        x, out, scale, size, x.stride(0), LARGEST_VALUE=LARGEST[KINDS[format]], BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
    )  # fmt: skip
    return out, scale
