"""The short convolution of LFM2: a layer that mixes each token with the few tokens before it, channel by channel.

A token is projected to b, c and x. The convolution's input for the token is b * x. The token's output is c times the
convolution of the last `taps` inputs. The state of a sequence is its last taps - 1 inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.recurrent.recurrent_state import RecurrentState, StateSlots
from worker.kernels.recurrent.recurrent_torch import convolve, sequences


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """The sizes of a short convolution."""

    channels: int
    taps: int  # how many tokens the convolution covers

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def memory(self) -> int:
        return 0


def short_conv_torch(
    projected: Tensor,
    weight: Tensor,
    state: RecurrentState,
    slots: StateSlots,
) -> Tensor:
    """Returns the output [T, channels] in the dtype of `projected`, and writes the new state of every sequence.

    projected [T, 3 channels]: b, c, x; weight [taps, channels] float32. The convolution is computed in fp32. The result
    of the convolution and the products with b and c are rounded to the dtype.
    """
    b, c, x = projected.chunk(3, dim=1)
    inputs, out = b * x, torch.empty_like(c)
    for sequence in sequences(slots):
        convolved = convolve(inputs, weight, state, sequence)
        out[sequence.rows] = c[sequence.rows] * convolved.to(c.dtype)
    return out
