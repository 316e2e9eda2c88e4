"""The sizes of recurrent layers, and the state of fixed size that such a layer keeps for a sequence, in place of K/V.

A step reads the state of a sequence from one slot and writes the new state to another slot, so a step can be repeated.
"""

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.spec import RecurrentShape

NO_STATE = -1  # in place of a slot to read: the sequence begins in this step and has no state yet
COLUMNS = 32  # a slot pads the columns of its matrices to a multiple of 32 (worker/ops/recurrent/csrc/state_columns.h)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The states of one layer in all slots. Each form of a layer orders the elements of `memory` in its own way."""

    tail: Tensor  # [slots, *shape.tail] in the dtype of the model: the last inputs of the convolution
    memory: Tensor  # [slots, shape.memory] float32

    @classmethod
    def zeros(cls, shape: RecurrentShape, slots: int, dtype: torch.dtype, device: torch.device) -> "RecurrentState":
        return cls(
            torch.zeros(slots, *shape.tail, dtype=dtype, device=device), torch.zeros(slots, shape.memory, device=device)
        )


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots that the S sequences of a step read and write, and the rows of these sequences.

    A slot that one sequence writes must not be read in the same step, nor be written by another sequence. Only the
    scratch slot may be written by several dummy sequences, and by the padding of captured steps. On a GPU, the outputs
    of sequences that share the scratch slot are right, because states stay in registers until the end. In the C
    library, they may be wrong, because it keeps the current state in the slot that is written.
    """

    read: Tensor  # [S] int32: slots, or NO_STATE
    write: Tensor  # [S] int32: slots
    query_start_loc: Tensor  # [S + 1] int32: the first row of each sequence, and the number of all rows


def padded_numbers(matrices: tuple[int, int, int]) -> int:
    """Returns how many numbers a slot has, including padding. matrices: (how many matrices there are, their rows, their
    columns)
    """
    count, rows, columns = matrices
    return count * rows * -(-columns // COLUMNS) * COLUMNS


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """The sizes of a Gated DeltaNet layer. Several consecutive value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # how many tokens the convolution covers

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The total width of queries, keys and values, which are side by side."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> Sequence[int]:
        """The widths of the two parts of the projected input: queries, keys and values together; output gates."""
        return self.channels, self.values

    @property
    def gates(self) -> Sequence[int]:
        """The widths of two further projections of the input: b, from which beta is computed, and a, from which the
        decay is computed.
        """
        return self.value_heads, self.value_heads

    @property
    def tail(self) -> tuple[int, int]:
        return self.taps - 1, self.channels

    @property
    def matrices(self) -> tuple[int, int, int]:
        """How many matrices S a state has, and how many rows and columns each matrix has."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def memory(self) -> int:
        return padded_numbers(self.matrices)


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


@dataclass(frozen=True, slots=True)
class RecurrentC:
    """A recurrent layer without its linears, as the C library reads it."""

    function: str  # a field of library.Kernels
    struct: Structure
    row_floats: int  # how much scratch memory each row of a step needs, in floats
    referenced: tuple[object, ...]  # the owners of the memory that the struct points to
