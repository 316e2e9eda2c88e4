"""Helpers for recurrent layers in plain PyTorch, which compute the sequences of a step one after another."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.recurrent.recurrent_state import NO_STATE, RecurrentState, StateSlots


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
