"""Triton kernel for short_conv: one program computes some channels of all rows of one sequence in the step.

It computes the rows in blocks. The result of a row does not depend on its place in a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.recurrent.recurrent import find_sequence
from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots

ROWS, CHANNELS = 16, 64  # the sizes of a block


@triton.jit
def _inputs(x_ptr, tail_ptr, start, at, channel, mask, channels, begins, TAPS: tl.constexpr):
    """Returns the convolution's inputs b * x in fp32 for rows `at` [rows, 1] of a sequence. Negative `at`: the input is
    read from the tail.
    """
    now, before = mask & (at >= 0), mask & (at < 0) & (begins == 0)
    row_ptrs = x_ptr + (start + at) * 3 * channels + channel
    b, x = tl.load(row_ptrs, mask=now, other=0.0), tl.load(row_ptrs + 2 * channels, mask=now, other=0.0)
    old = tl.load(tail_ptr + (TAPS - 1 + at) * channels + channel, mask=before, other=0.0)
    return (b * x).to(tl.float32) + old.to(tl.float32)


@triton.jit(do_not_specialize=["channels"])
def _short_conv_kernel(
    x_ptr, conv_ptr, tails_ptr, read_slots_ptr, write_slots_ptr, query_start_loc_ptr, out_ptr, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    start, end, read, write, begins = find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr)
    if start == end:
        return
    size = (TAPS - 1) * channels
    tail_ptr, new_tail_ptr = tails_ptr + read * size, tails_ptr + write * size
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    in_row = channel < channels
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for first in range(0, end - start, ROWS):
        at = first + tl.arange(0, ROWS)[:, None]
        mask = in_row & (at < end - start)
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(conv_ptr + tap * channels + channel, mask=in_row, other=0.0)
            back = at - (TAPS - 1 - tap)
            total += weight * _inputs(x_ptr, tail_ptr, start, back, channel, mask, channels, begins, TAPS)
        c = tl.load(x_ptr + (start + at) * 3 * channels + channels + channel, mask=mask, other=0.0)
        tl.store(out_ptr + (start + at) * channels + channel, c * total.to(dtype), mask=mask)
    for tap in tl.static_range(TAPS - 1):
        at = end - start - (TAPS - 1) + tap + tl.zeros((1, 1), tl.int64)
        kept = _inputs(x_ptr, tail_ptr, start, at, channel, in_row, channels, begins, TAPS)
        tl.store(new_tail_ptr + tap * channels + channel, kept.to(dtype), mask=in_row)


def short_conv_triton(
    projected: Tensor,
    weight: Tensor,
    state: RecurrentState,
    slots: StateSlots,
) -> Tensor:
    """Computes the same as `short_conv_torch`. No sequence may read the slot that it writes."""
    taps, channels = weight.shape
    assert projected.shape[1] == 3 * channels and projected.is_contiguous() and state.tail.dtype == projected.dtype
    assert state.tail.is_contiguous() and weight.is_contiguous()
    out = torch.empty(len(projected), channels, dtype=projected.dtype, device=projected.device)
    _short_conv_kernel[(triton.cdiv(channels, CHANNELS), len(slots.read))](
        projected, weight, state.tail, slots.read, slots.write, slots.query_start_loc, out, channels,
        TAPS=taps, ROWS=ROWS, CHANNELS=CHANNELS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
