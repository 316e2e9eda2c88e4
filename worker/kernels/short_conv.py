"""The short convolution of LFM2: a layer that mixes each token with the few before it, channel by channel.

A token is projected to b, c and x. Its input to the convolution is b * x, its output is c times the convolution of the
last `taps` inputs. The state of a sequence is its last taps - 1 inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu import short_conv as in_c
from worker.kernels.recurrent_state import NO_STATE, RecurrentState


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """The sizes of a layer."""

    channels: int
    taps: int  # inputs of the convolution

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def memory(self) -> int:
        return 0


def short_conv(
    projected: Tensor,
    weight: Tensor,
    state: RecurrentState,
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Returns the output [T, channels] in the dtype of `projected`, and writes the new state of every sequence.

    projected [T, 3 channels]: b, c, x; weight [taps, channels] float32; read_slots, write_slots [S] int32,
    query_start_loc [S + 1] int32. A slot that one sequence writes must not be read in the same step. Products and the
    convolution, which is computed in fp32, are rounded to the dtype.
    """
    if projected.is_cuda:
        from worker.kernels.gpu.short_conv import short_conv_triton

        return short_conv_triton(projected, weight, state, read_slots, write_slots, query_start_loc)
    run = in_c.short_conv if in_c.supports(projected.dtype, len(weight)) else short_conv_torch
    return run(projected, weight, state, read_slots, write_slots, query_start_loc)


def short_conv_torch(
    projected: Tensor,
    weight: Tensor,
    state: RecurrentState,
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    b, c, x = projected.chunk(3, dim=1)
    inputs, taps, out = b * x, len(weight), torch.empty_like(c)
    ends = query_start_loc.tolist()
    for seq, (read, write) in enumerate(zip(read_slots.tolist(), write_slots.tolist(), strict=True)):
        rows = slice(ends[seq], ends[seq + 1])
        if rows.start == rows.stop:
            continue
        before = torch.zeros_like(state.tail[0]) if read == NO_STATE else state.tail[read]
        known = torch.cat((before, inputs[rows]))  # [taps - 1 + rows, channels]
        windows = known.float().unfold(0, taps, 1)  # [rows, channels, taps]
        out[rows] = c[rows] * (windows * weight.T).sum(2).to(c.dtype)
        state.tail[write] = known[len(known) - taps + 1 :]
    return out
