"""Shared by the sampling kernels: a row's highest logit, and each token's distance from it, sort key and weight."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

ONE = tl.constexpr(float(1 << 40))
LOW_31 = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(1 << 63))

COLUMNS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr")
by_row = triton.jit(do_not_specialize_on_alignment=COLUMNS)  # columns may lie anywhere: that compiles nothing anew


@triton.jit
def softmax_weight(gap, LIBRARY: tl.constexpr):
    """exp(-gap) in units of 2**-40. The library's exp is torch's on the same device; elsewhere its last bit differs."""
    p = libdevice.exp(-gap) if LIBRARY else tl.exp(-gap)
    return (p * ONE).to(tl.int64)


@triton.jit
def ordered(x):
    """float32 -> int32 that order alike; NaN is above all, as max() has it, and the zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LOW_31, bits ^ ((bits >> 31) & LOW_31))


@triton.jit
def row_peak(best_ptr, row, parts, BLOCK_S: tl.constexpr):
    """The row's highest logit and the lowest id that has it."""
    part = tl.arange(0, BLOCK_S)
    best = tl.max(tl.load(best_ptr + row * parts + part, mask=part < parts, other=LOWEST), axis=0)
    key = (best >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & LOW_31)).to(tl.float32, bitcast=True), (best & LOW_31) ^ LOW_31


@triton.jit
def is_drawn(peak, temperature):
    """Whether the row is neither greedy nor without anything to weigh."""
    return (temperature != 0) & (tl.abs(peak) < float("inf"))


@triton.jit
def gaps(logits_ptr, row, stride, at, width, peak, temperature):
    """How far below the peak, >= 0; the bits of it are a token's key."""
    x = tl.load(logits_ptr + row * stride + at, mask=at < width, other=float("-inf"))
    return tl.div_rn(peak - x, temperature)


@triton.jit
def kept(gap, min_p, LIBRARY: tl.constexpr):
    """Weights, none where min-p forbids it."""
    weight = softmax_weight(gap, LIBRARY)
    return tl.where(weight < (min_p.to(tl.float64) * ONE).to(tl.int64), 0, weight)
