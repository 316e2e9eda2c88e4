"""Mamba-2 (arXiv 2405.21060): a sequence has a state of fixed size, and no K/V.

For each head of a sequence, the state is a matrix S [state_size, head_dim]. A token has an input x [head_dim] and a
step dt for each head, and vectors b and c [state_size], which the heads of a group share. It changes S and reads it:

    S = exp(dt * A) * S + b (dt * x)^T;  output = S^T c + D * x

Before this recurrence, x, b and c pass a short causal convolution over the last `taps` tokens and SiLU; dt passes
softplus. After the recurrence, the output is multiplied by SiLU of its gate, and an RMS norm is applied over the heads
of a group.

The state advances token by token in every implementation, for the same reason as in delta_net.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.recurrent.reference import convolve, read_matrices, sequences, write_matrices
from worker.ops.recurrent_state import RecurrentState, StateSlots, padded_numbers


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of a Mamba-2 layer. A group consists of consecutive heads."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int  # how many tokens the convolution covers

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> Sequence[int]:
        """The widths of x, b and c, which are side by side."""
        return self.values, self.groups * self.state_size, self.groups * self.state_size

    @property
    def channels(self) -> int:
        return sum(self.mixed)

    @property
    def projected(self) -> Sequence[int]:
        """The widths of the two parts of the projected input, dt excluded: output gates; x, b and c together."""
        return self.values, self.channels

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices S a state has, and how many rows and columns each matrix has."""
        return self.heads, self.state_size, self.head_dim

    @property
    def memory(self) -> int:
        return padded_numbers(self.matrices)


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The small weights of a Mamba-2 layer."""

    conv: Tensor  # [taps, channels] float32
    conv_bias: Tensor  # [channels] float32
    decay: Tensor  # [heads] float32, negative: A = -exp(A_log)
    dt_bias: Tensor  # [heads] float32
    skip: Tensor  # [heads] float32: D
    norm: Tensor  # [values]


def mamba2_torch(
    projected: Tensor,
    steps: Tensor,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Returns the gated output [T, values] in the dtype of `projected`, and writes the new state of every sequence.

    projected [T, sum of shape.projected]; steps [T, heads]: dt before its bias is added. In this form, the memory of a
    slot is [heads, state_size, head_dim], then padding. Other forms order the numbers of a slot differently.
    """
    gates, mixed = projected.split_with_sizes(shape.projected, dim=1)
    dt, out = F.softplus(steps.float() + weights.dt_bias), torch.empty_like(gates, dtype=torch.float32)
    for sequence in sequences(slots):
        rows, memory = sequence.rows, read_matrices(state, sequence.read, shape.matrices)
        convolved = F.silu(convolve(mixed, weights.conv, state, sequence) + weights.conv_bias)
        out[rows], memory = _advance(convolved, dt[rows], weights, shape, memory)
        write_matrices(state, sequence.write, memory)
    gated = (out * F.silu(gates.float())).unflatten(1, (shape.groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(2, keepdim=True) + eps)
    return (normed.flatten(1) * weights.norm.float()).to(projected.dtype)


def _advance(
    mixed: Tensor, dt: Tensor, weights: Mamba2Weights, shape: Mamba2Shape, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output [rows, values] of a sequence's rows, and the state after its last row.

    mixed [rows, channels]: x, b and c after the convolution; dt [rows, heads]; memory: the state before the first row
    """
    x, b, c = mixed.split_with_sizes(shape.mixed, dim=1)
    x, repeats, outputs = x.unflatten(1, (shape.heads, -1)), shape.heads // shape.groups, []
    b, c = (part.unflatten(1, (shape.groups, -1)).repeat_interleave(repeats, dim=1) for part in (b, c))
    for row in range(len(mixed)):
        decay = (dt[row] * weights.decay).exp()[:, None, None]
        memory = memory * decay + b[row, :, :, None] * (dt[row, :, None] * x[row])[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", memory, c[row]) + weights.skip[:, None] * x[row])
    return torch.stack(outputs).flatten(1), memory


# The short convolution of LFM2: a layer that mixes each token with the few tokens before it, channel by channel.
#
# A token is projected to b, c and x. The convolution's input for the token is b * x. The token's output is c times
# the convolution of the last `taps` inputs. The state of a sequence is its last taps - 1 inputs.


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
