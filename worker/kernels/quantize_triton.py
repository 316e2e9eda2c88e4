"""Eight-bit weights inside a Triton kernel: widened in registers, exactly, on their way into a product.

int8 and e4m3 are exact in bfloat16 and float16, so the products are those that quantize.py means. A cast would use
conversions, which a multiprocessor has few units for; this takes two to three plain instructions for each number.
"""

import torch
import triton
import triton.language as tl

FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # 0: a weight in full

FAST = tl.constexpr(not triton.knobs.runtime.interpret)  # whether a GPU's instructions can be had

# Two bytes in, one register of two numbers out; prmt lays each byte into a half of its own. Two, because that is what
# a thread loads at a time on the way to the tensor core.
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
    """Bytes (int8) to the numbers they are in FORMAT of FORMATS, exactly."""
    if FORMAT == 0:
        return raw
    elif FAST and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_INT8_BF16 if FORMAT == 1 else _FP8_BF16, "=r,h", [raw], tl.bfloat16, True, 2)
    elif FAST and dtype == tl.float16:
        return tl.inline_asm_elementwise(_INT8_F16 if FORMAT == 1 else _FP8_F16, "=r,h", [raw], tl.float16, True, 2)
    elif FORMAT == 1:
        return raw.to(dtype)
    else:  # e4m3 in the upper bits of a float, whose bias is greater by 120
        bits = raw.to(tl.int32)
        wide = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return (wide.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
