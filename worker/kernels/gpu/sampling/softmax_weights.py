"""Functions for the sampling kernels: a row's highest logit, and the gap, sort key and softmax weight of a token."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

ONE = tl.constexpr(float(1 << 40))
LOW_31_BITS = tl.constexpr(0x7FFFFFFF)
LOWEST_INT64 = tl.constexpr(-(1 << 63))

ROW_PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr")
# Kernels with this decorator are not compiled again when a parameter's alignment changes.
jit_unaligned_columns = triton.jit(do_not_specialize_on_alignment=ROW_PARAMETERS)


@triton.jit
def softmax_weight(gap, USE_LIBDEVICE: tl.constexpr):
    """Returns exp(-gap) in units of 2**-40.

    On the same device, libdevice's exp and torch's exp give the same bits. Between devices, the last bit may differ.
    """
    p = libdevice.exp(-gap) if USE_LIBDEVICE else tl.exp(-gap)
    return (p * ONE).to(tl.int64)


@triton.jit
def sortable_bits(x):
    """Converts float32 to int32 with the same order. NaN is highest, as in torch.max; 0.0 and -0.0 become equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LOW_31_BITS, bits ^ ((bits >> 31) & LOW_31_BITS))


@triton.jit
def row_max(part_max_ptr, row, parts, BLOCK_PARTS: tl.constexpr):
    """Returns the row's highest logit, and the lowest id with this logit."""
    part = tl.arange(0, BLOCK_PARTS)
    packed = tl.max(tl.load(part_max_ptr + row * parts + part, mask=part < parts, other=LOWEST_INT64), axis=0)
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & LOW_31_BITS)).to(tl.float32, bitcast=True), (packed & LOW_31_BITS) ^ LOW_31_BITS


@triton.jit
def is_sampled(max_logit, temperature):
    """Returns whether the row is sampled: that is, it is not greedy, and its highest logit is finite."""
    return (temperature != 0) & (tl.abs(max_logit) < float("inf"))


@triton.jit
def logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature):
    """Returns each token's gap (max_logit - logit) / temperature, which is >= 0. Its bits are the token's sort key."""
    x = tl.load(logits_ptr + row * stride + token_ids, mask=token_ids < width, other=float("-inf"))
    return tl.div_rn(max_logit - x, temperature)


@triton.jit
def min_p_weight(gap, min_p, USE_LIBDEVICE: tl.constexpr):
    """Returns softmax weights. Tokens that min-p drops have weight zero."""
    weight = softmax_weight(gap, USE_LIBDEVICE)
    return tl.where(weight < (min_p.to(tl.float64) * ONE).to(tl.int64), 0, weight)
