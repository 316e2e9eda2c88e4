"""Recurrent layers in plain PyTorch: the gated delta rule, Mamba-2 and the short convolution.

The gated delta rule (Gated DeltaNet, arXiv 2412.06464): a sequence has a state of fixed size, and no K/V.

For each value head of a sequence, the state is a matrix S [key_dim, value_dim]. A token with query q, key k, value v,
decay g and strength beta changes S and reads it:

    S = g * S;  S = S + k (beta * (v - S^T k))^T;  output = S^T q

Before this recurrence, queries, keys and values pass a short causal convolution over the last `taps` tokens and SiLU,
and q and k are scaled to length 1. After the recurrence, an RMS norm is applied to the output of each head, and the
result is multiplied by SiLU of its gate.

The state advances token by token in every implementation. So a token's result is the same whether it is computed as a
decode or within a prompt chunk of any length, and a step needs only the state before its first token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.recurrent_state import NO_STATE, DeltaNetShape, Mamba2Shape, RecurrentState, StateSlots

LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The small weights of a Gated DeltaNet layer."""

    conv: Tensor  # [taps, channels] float32
    decay: Tensor  # [value_heads] float32, negative: -exp(A_log)
    dt_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]


def delta_net_torch(
    projected: Tensor,
    gates: Tensor,
    weights: DeltaNetWeights,
    shape: DeltaNetShape,
    state: RecurrentState,
    slots: StateSlots,
    eps: float,
) -> Tensor:
    """Returns the gated output [T, values] in the dtype of `projected`, and writes the new state of every sequence.

    projected [T, sum of shape.projected]; gates [T, sum of shape.gates]. In this form, the memory of a slot is
    [value_heads, key_dim, value_dim], then padding. Other forms order the numbers of a slot differently.
    """
    mixed, z = projected.split_with_sizes(shape.projected, dim=1)
    b, a = gates.split_with_sizes(shape.gates, dim=1)
    beta, decay = b.float().sigmoid(), (weights.decay * F.softplus(a.float() + weights.dt_bias)).exp()
    out = torch.empty_like(z, dtype=torch.float32).unflatten(1, (shape.value_heads, shape.value_dim))
    for sequence in sequences(slots):
        rows, memory = sequence.rows, read_matrices(state, sequence.read, shape.matrices)
        qkv = F.silu(convolve(mixed, weights.conv, state, sequence))
        out[rows], memory = _advance(qkv, decay[rows], beta[rows], shape, memory)
        write_matrices(state, sequence.write, memory)
    normed = out * torch.rsqrt(out.square().mean(2, keepdim=True) + eps) * weights.norm.float()
    return (normed.flatten(1) * F.silu(z.float())).to(projected.dtype)


def _advance(qkv: Tensor, decay: Tensor, beta: Tensor, shape: DeltaNetShape, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [rows, value_heads, value_dim] of a sequence's rows, and the state after its last row."""
    q, k, v = qkv.split_with_sizes((shape.keys, shape.keys, shape.values), dim=1)
    repeats = shape.value_heads // shape.key_heads
    q, k = (_unit(x.unflatten(1, (shape.key_heads, -1))).repeat_interleave(repeats, dim=1) for x in (q, k))
    v, outputs = v.unflatten(1, (shape.value_heads, -1)), []
    for row in range(len(qkv)):
        memory = memory * decay[row, :, None, None]
        recalled = torch.einsum("hkv,hk->hv", memory, k[row])
        delta = (v[row] - recalled) * beta[row, :, None]
        memory = memory + k[row, :, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", memory, q[row] * shape.key_dim**-0.5))
    return torch.stack(outputs), memory


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


# Helpers for recurrent layers in plain PyTorch, which compute the sequences of a step one after another.


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a step, and the slots that the sequence reads and writes."""

    rows: slice
    read: int
    write: int


def sequences(slots: StateSlots) -> Iterator[SequenceRows]:
    """Yields the sequences of a step, without sequences that have no rows."""
    ends = slots.query_start_loc.tolist()
    for seq, (read, write) in enumerate(zip(slots.read.tolist(), slots.write.tolist(), strict=True)):
        if ends[seq] < ends[seq + 1]:
            yield SequenceRows(slice(ends[seq], ends[seq + 1]), read, write)


def convolve(inputs: Tensor, weight: Tensor, state: RecurrentState, sequence: SequenceRows) -> Tensor:
    """Returns the causal convolution of a sequence, [rows, channels] float32. Writes its last inputs to its slot.

    inputs [T, channels]: the inputs of all sequences; weight [taps, channels] float32
    """
    before = torch.zeros_like(state.tail[0]) if sequence.read == NO_STATE else state.tail[sequence.read]
    known = torch.cat((before, inputs[sequence.rows]))  # [taps - 1 + rows, channels]
    state.tail[sequence.write] = known[len(known) - len(weight) + 1 :]
    windows = known.float().unfold(0, len(weight), 1)  # [rows, channels, taps]
    return (windows * weight.T).sum(2)


def read_matrices(state: RecurrentState, slot: int, sizes: tuple[int, int, int]) -> Tensor:
    """Returns the matrices of a slot. sizes: (how many matrices, their rows, their columns). In plain PyTorch, all
    padding of a slot is at the end.
    """
    if slot == NO_STATE:
        return torch.zeros(sizes, device=state.memory.device)
    return state.memory[slot, : torch.Size(sizes).numel()].view(sizes)


def write_matrices(state: RecurrentState, slot: int, matrices: Tensor) -> None:
    """Writes matrices to a slot, in the layout that read_matrices reads."""
    state.memory[slot, : matrices.numel()] = matrices.flatten()


# Mamba-2 (arXiv 2405.21060): a sequence has a state of fixed size, and no K/V.
#
# For each head of a sequence, the state is a matrix S [state_size, head_dim]. A token has an input x [head_dim] and a
# step dt for each head, and vectors b and c [state_size], which the heads of a group share. It changes S and reads it:
#
#     S = exp(dt * A) * S + b (dt * x)^T;  output = S^T c + D * x
#
# Before this recurrence, x, b and c pass a short causal convolution over the last `taps` tokens and SiLU; dt passes
# softplus. After the recurrence, the output is multiplied by SiLU of its gate, and an RMS norm is applied over the
# heads of a group.
#
# The state advances token by token in every implementation, for the same reason as in the gated delta rule.


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
        out[rows], memory = _advance_mamba2(convolved, dt[rows], weights, shape, memory)
        write_matrices(state, sequence.write, memory)
    gated = (out * F.silu(gates.float())).unflatten(1, (shape.groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(2, keepdim=True) + eps)
    return (normed.flatten(1) * weights.norm.float()).to(projected.dtype)


def _advance_mamba2(
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
