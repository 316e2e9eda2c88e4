"""Functions for the Triton kernels of recurrent layers.

Every program itself computes the convolutions that it needs. A separate kernel for convolutions would have to know the
sequence of each row.
"""

import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.recurrent.delta_net import DeltaNetShape
from worker.kernels.recurrent.mamba2 import Mamba2Shape
from worker.kernels.recurrent.recurrent_state import RecurrentState

COLUMNS = 32  # how many columns of a matrix a program advances


def check_inputs(
    projected: Tensor, gates: Tensor, shape: DeltaNetShape | Mamba2Shape, gate_width: int, state: RecurrentState
) -> None:
    """Asserts that projections have the right shapes: projected [T, sum of shape.projected], gates [T, gate_width]."""
    assert projected.shape[1] == sum(shape.projected) and projected.is_contiguous()
    assert gates.shape == (len(projected), gate_width) and gates.is_contiguous()
    assert state.tail.dtype == projected.dtype == gates.dtype


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def find_sequence(seq, read_slots_ptr, write_slots_ptr, query_start_loc_ptr):
    """Returns the first row of a sequence, the row after its last row, the slots that it reads and writes, and whether
    the sequence begins in this step. A sequence that begins has no state to read; 0 is then returned as the slot to
    read.
    """
    start, end = tl.load(query_start_loc_ptr + seq).to(tl.int64), tl.load(query_start_loc_ptr + seq + 1).to(tl.int64)
    read, write = tl.load(read_slots_ptr + seq).to(tl.int64), tl.load(write_slots_ptr + seq).to(tl.int64)
    return start, end, tl.maximum(read, 0), write, (read < 0).to(tl.int32)


@triton.jit
def convolved(
    x_ptr, tail_ptr, conv_ptr, bias_ptr, channel, mask, row, at, stride, channels, begins, TAPS: tl.constexpr
):  # fmt: skip
    """Returns SiLU of the convolution of some channels, for one row.

    row: the row's index in the step; at: its index among the rows of its sequence in this step
    bias_ptr: None if there is no bias
    tail_ptr: the sequence's last inputs before this step; begins: if true, there are none, and zeros are used instead
    """
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        now = tl.load(x_ptr + (row - back) * stride + channel, mask=mask & (at >= back), other=0.0)
        before = (at < back) & (begins == 0)
        old = tl.load(tail_ptr + (TAPS - 1 + at - back) * channels + channel, mask=mask & before, other=0.0)
        weight = tl.load(conv_ptr + tap * channels + channel, mask=mask, other=0.0)
        total += weight * (now.to(tl.float32) + old.to(tl.float32))
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0)
    return silu(total)


@triton.jit
def keep_tail(x_ptr, tail_ptr, to_ptr, channel, mask, start, end, stride, channels, begins, TAPS: tl.constexpr):
    """Writes a sequence's last inputs of some channels to the new tail. They may come from this step or from the old
    tail.
    """
    for tap in tl.static_range(TAPS - 1):
        # the input's index among the sequence's rows in this step; if negative, the input is in the old tail
        at = end - (TAPS - 1) + tap - start
        now = tl.load(x_ptr + (start + at) * stride + channel, mask=mask & (at >= 0), other=0.0)
        before = (at < 0) & (begins == 0)
        old = tl.load(tail_ptr + (TAPS - 1 + at) * channels + channel, mask=mask & before, other=0.0)
        tl.store(to_ptr + tap * channels + channel, now + old, mask=mask)
