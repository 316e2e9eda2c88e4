"""Turns codes of four or eight bits into a weight in Triton kernels, in registers, right before a matrix product.

worker/ops/quantized_weight.py defines the numbers: value * scale + minimum in float32, with each operation
rounded, and then rounded once to the format of the tokens' activations. If the scale is exact in bfloat16, the tokens
are bfloat16, and there is no minimum, then one multiplication in bfloat16 gives the same bits with half the
instructions: the product of two bfloat16 numbers is exact in float32.

A word of 16 bits has the codes of two or four inputs (packed_codes.py). A thread holds words in pairs, because the
tensor core reads numbers in pairs, and each instruction here works on the codes of both words. A cast would use
conversion instructions, for which a multiprocessor has few units.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from worker.ops.linear.packed_codes import PackedCodes
from worker.ops.triton_common import COMPILED

NARROW = {None: "", torch.bfloat16: "bf16", torch.float16: "fp16"}

# PTX for each code map that has a formula. It turns one part of the codes in the words $1 into v, two exact bfloat16
# numbers. {low} is the shift that moves the codes of this part to the lowest bits of each word, {high} the shift to the
# highest bits.
_BF16_PAIR = {
    "int4": """
        shr.b32 v, $1, {low};  // 128 + (value + 8), less 136
        lop3.b32 v, v, 0x000f000f, 0x43084308, 0x6a;
        mov.b32 a, 0x3f803f80;
        mov.b32 b, 0xc308c308;
        fma.rn.bf16x2 v, v, a, b;""",
    "int8": """
        shr.b32 v, $1, {low};  // 128 + the low seven bits, less 128 or, with the sign bit, 256
        lop3.b32 a, v, 0x00800080, 0x43004300, 0xea;
        lop3.b32 v, v, 0x007f007f, 0x43004300, 0xea;
        mov.b32 b, 0xbf80bf80;
        fma.rn.bf16x2 v, a, b, v;""",
    "e4m3": """
        shl.b32 v, $1, {high};  // exponent and mantissa into their places, then times 2^120 for the other bias
        shr.b32 a, v, 4;
        and.b32 a, a, 0x07f007f0;
        lop3.b32 v, v, 0x80008000, a, 0xea;
        mov.b32 a, 0x7b807b80;
        mov.b32 b, 0x80008000;
        fma.rn.bf16x2 v, v, a, b;""",
    "e2m1": """
        shl.b32 v, $1, {high};  // the same, times 2^126
        shr.b32 a, v, 6;
        and.b32 a, a, 0x01c001c0;
        lop3.b32 v, v, 0x80008000, a, 0xea;
        mov.b32 a, 0x7e807e80;
        mov.b32 b, 0x80008000;
        fma.rn.bf16x2 v, v, a, b;""",
}  # fmt: skip

_WIDEN_PAIR = """
        shl.b32 a, v, 16;
        and.b32 b, v, 0xffff0000;
        mov.b32 f, a;
        mov.b32 g, b;"""

# PTX for the other code maps: it reads f and g, the float32 numbers of the codes in the two words, from the table at
# {table}. With this program, the compiler passes the weights through shared memory, so these code maps are slower.
_FP32_PAIR_OF_TABLE = """
        shr.b32 v, $1, {low};
        and.b32 a, v, 0x0000000f;
        mad.wide.u32 at, a, 4, {table};
        ld.global.nc.f32 f, [at];
        shr.b32 v, v, 16;
        and.b32 a, v, 0x0000000f;
        mad.wide.u32 at, a, 4, {table};
        ld.global.nc.f32 g, [at];"""


@dataclass(frozen=True, slots=True)
class Format:
    """The formats of a weight and of the activations that it multiplies, as a constant for kernels.

    PackedCodes explains the fields without a comment.
    """

    bits: int
    part_inputs: int
    blocks: int  # how many blocks of words together encode STEP inputs
    parts: int  # how many codes a word has
    group_size: int
    narrow: str  # the name of PackedCodes.narrow: bf16, fp16 or "" for None
    has_minimum: bool
    pairs: bool
    exact: bool  # if true, weights are computed in bfloat16 (see the module docstring)
    table: bool  # if true, the values of the code map are read from memory
    programs: tuple[str, ...]  # the PTX program for each part of a word (see _program)
    operands: str  # the constraints of the operands of `programs`, for inline assembly

    @classmethod
    def of(cls, weight: PackedCodes, tokens: torch.dtype) -> "Format":
        bits, minimum, formula = weight.code_map.bits, weight.has_minimum, _BF16_PAIR.get(weight.code_map.name)
        exact = weight.narrow == tokens == torch.bfloat16 and formula is not None and not minimum
        return cls(
            bits, weight.part_inputs, weight.codes.shape[2], 16 // bits, weight.group_size, NARROW[weight.narrow],
            minimum, weight.pairs, exact, formula is None,
            tuple(_program(formula, bits, part, tokens, minimum, exact) for part in range(16 // bits)),
            "=r,r,r,r" + ",r,r" * minimum + ",l,l" * (formula is None),
        )  # fmt: skip


@lru_cache
def _program(formula: str | None, bits: int, part: int, tokens: torch.dtype, minimum: bool, exact: bool) -> str:
    """Returns a PTX program that turns part `part` of a pair of words into two weights in the format `tokens`.

    Its operands are the weights ($0), the words ($1), the scale twice ($2, $3), then the minimum twice if there is one,
    and then the table's address twice if the table is read.
    """
    pair = (formula or _FP32_PAIR_OF_TABLE).format(
        low=part * bits, high=16 - bits - part * bits, table="$6" if minimum else "$4"
    )
    if exact:
        end = "mov.b32 b, 0x80008000; fma.rn.bf16x2 $0, v, $2, b;"
    else:
        end = (_WIDEN_PAIR if formula else "") + "mul.rn.f32 f, f, $2; mul.rn.f32 g, g, $3;"
        end += "add.rn.f32 f, f, $4; add.rn.f32 g, g, $5;" if minimum else ""
        end += f"cvt.rn.{'f16' if tokens == torch.float16 else 'bf16'}x2.f32 $0, g, f;"
    return "{ .reg .b32 v, a, b; .reg .b64 at; .reg .f32 f, g;" + pair + end + "}"


@triton.jit
def dequantize(words, scale, minimum, table_ptr, dtype: tl.constexpr, FORMAT: tl.constexpr, PART: tl.constexpr):
    """Returns the weights [N, part_inputs] in `dtype` that part PART of the words encodes.

    scale, minimum: [N] float32; if FORMAT.exact, `scale` is [N] int32, and each int32 has a bfloat16 scale twice
    table_ptr: the code map's values
    """
    if COMPILED and dtype != tl.float32:
        if FORMAT.table:
            address = table_ptr.to(tl.uint64)
            if FORMAT.has_minimum:
                given = [words, scale[:, None], minimum[:, None], address]
            else:
                given = [words, scale[:, None], address]
        elif FORMAT.has_minimum:
            given = [words, scale[:, None], minimum[:, None]]
        else:
            given = [words, scale[:, None]]
        return tl.inline_asm_elementwise(
            FORMAT.programs[PART], FORMAT.operands, given, tl.float16 if dtype == tl.float16 else tl.bfloat16, True, 2
        )
    else:
        code = (words.to(tl.int32) >> (PART * FORMAT.bits)) & ((1 << FORMAT.bits) - 1)
        number = tl.load(table_ptr + code) * scale[:, None]
        if FORMAT.has_minimum:
            number += minimum[:, None]
        return number.to(dtype)


@triton.jit
def widen_half(word, narrow: tl.constexpr):
    """Converts the lower 16 bits of int32 words to float32. narrow: the format of these bits, bf16 or fp16"""
    if narrow == "bf16":
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
