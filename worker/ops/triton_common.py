"""Converts numbers from and to eight bits in Triton kernels.

Weights of eight bits are converted exactly, in registers, right before a matrix product. Tokens are quantized to eight
bits by a kernel of their own before a product.

int8 and e4m3 values are exact in bfloat16 and float16, so products are as worker/ops/quantized_weight.py defines
them. A cast would use conversion instructions, for which a multiprocessor has few units. This code takes two to three
plain instructions per number.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.launch_options import GpuOptions
from worker.ops.quantized_weight import KINDS, LARGEST

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
    """Computes the same as `quantize_tokens` in worker/ops/quantized_weight.py: values [T, K], scale [T]."""
    rows, size = x.shape
    assert rows and (x.stride(1) == 1 or size == 1)
    out, scale = torch.empty(rows, size, dtype=format, device=x.device), torch.empty(rows, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_tokens_kernel[(rows,)](
        x, out, scale, size, x.stride(0), LARGEST_VALUE=LARGEST[KINDS[format]], BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
    )  # fmt: skip
    return out, scale


# Programmatic dependent launch (PDL): a kernel starts while the previous kernel still runs.
#
# Without PDL, a kernel starts when the previous kernel has ended and its results are in memory. In a decode, whose
# kernels take a few microseconds each, the device is then idle for a good part of the time. With PDL, the programs of
# the next kernel start as soon as all programs of the current kernel have called `launch_dependents` and the device
# has room for more programs. They prepare what depends on no other kernel, and then wait.
#
# The rules for a kernel that is launched with `launch_pdl`:
# - Every program of the kernel waits, even if it has nothing else to do. The next kernel waits only for this kernel. It
#   may use the results of earlier kernels only because this kernel has waited for them.
# - The wait precedes all loads of data that other kernels write, and all stores: an earlier kernel may still read
#   there.
# - The wait precedes all loops, because Triton's pipelining moves a loop's first loads before a wait inside the loop.
# Before the wait, a program may load only data that no kernel writes, for example weights.

LINE_BYTES = tl.constexpr(128)  # a line of the L2 cache
PREFETCHED_BYTES = 64 << 10  # weight bytes that a program prefetches: a multiprocessor's share of 2 µs of bandwidth
FEW_ROWS = 64  # products with more rows are limited by arithmetic, and have more programs than the device can hold


def pdl_options(options: GpuOptions) -> dict[str, Any]:
    """Returns a kernel's launch arguments for PDL: its constant PDL, and Triton's `launch_pdl`."""
    return {"PDL": True, "launch_pdl": True} if options.pdl else {"PDL": False}


def product_options(options: GpuOptions, rows: int) -> dict[str, Any]:
    """Returns the launch arguments of a matrix product for PDL and prefetching. rows: how many rows a tile has"""
    prefetched = PREFETCHED_BYTES if options.weight_prefetch and rows <= FEW_ROWS else 0
    return pdl_options(options) | {"PREFETCH": prefetched}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel start. All programs call this first. Without PDL, the next kernel starts when all programs
    have ended.
    """
    if PDL and COMPILED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernels(PDL: tl.constexpr):
    """Waits until all earlier kernels have ended and their stores are visible."""
    if PDL and COMPILED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_dependent(PDL: tl.constexpr):
    """Begins a program that has nothing to prepare: lets the next kernel start, and waits for earlier kernels."""
    launch_dependents(PDL)
    wait_for_kernels(PDL)


@triton.jit
def prefetch_to_l2(ptr, stride, runs, size, RUNS: tl.constexpr, BYTES: tl.constexpr):
    """Starts to load BYTES bytes into the L2 cache, and does not wait for them. They are the first bytes of RUNS runs
    of memory, equally many of each run.

    stride: elements from one run to the next; runs: how many runs there are; size: elements of a run. There may be
    fewer runs than RUNS, or shorter runs than BYTES / RUNS. With BYTES 0, does nothing.
    """
    if BYTES and COMPILED:
        LINES: tl.constexpr = BYTES // LINE_BYTES // RUNS
        line: tl.constexpr = LINE_BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
        run = tl.minimum(tl.arange(0, RUNS), runs - 1).to(tl.int64)
        element = tl.minimum(tl.arange(0, LINES) * line, size - 1)
        address = (ptr + run[:, None] * stride + element[None, :]).to(tl.uint64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


# A constant that tells kernels whether they are compiled, or run by Triton's interpreter.

# false in the interpreter, which cannot run inline assembly
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


# Functions for Triton kernels that read split-K partial sums (see worker/ops/norm/reference.py).

# Loads as usual. Triton 3.6 compiles no kernel that calls a function whose default for a constant is plain text.
NO_MODIFIER = tl.constexpr("")


@triton.jit
def load_split_k(pointers, mask, stride, dtype: tl.constexpr, SPLIT_K: tl.constexpr, CACHE: tl.constexpr = NO_MODIFIER):
    """Loads the block at `pointers`. With SPLIT_K > 1, returns the sum of SPLIT_K float32 blocks, added in order.

    stride: elements from one block to the next
    CACHE: ".cg" if other programs of the same kernel have stored the blocks: they must then be read from the L2 cache
    """
    x = tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE)
    for index in tl.static_range(1, SPLIT_K):
        x += tl.load(pointers + index * stride, mask=mask, other=0.0, cache_modifier=CACHE)
    return x.to(dtype)


def split_k_shape(x: Tensor, dims: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns how many partial sums x has, and how many elements are between one partial sum and the next.

    dims: how many dimensions the summed matrix product has. A summed x counts as one partial sum.
    """
    if x.ndim == dims:
        assert x.dtype == dtype
        return 1, 0
    assert x.ndim == dims + 1 and x.dtype == torch.float32 and x.is_contiguous()
    return x.shape[0], x.stride(0)
