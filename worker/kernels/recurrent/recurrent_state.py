"""The state of fixed size that a recurrent layer keeps of a sequence in place of K/V.

A step reads the state of a sequence from one slot and writes it to another one, so that a step can be repeated.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NO_STATE = -1  # as a slot that is read: the sequence begins with this step
COLUMNS = 32  # the columns of a matrix in a slot are padded to a multiple of this (cpu/csrc/recurrent/state_columns.h)


class RecurrentShape(Protocol):
    """The sizes of a kind of recurrent layer."""

    @property
    def tail(self) -> tuple[int, int]:
        """Returns how many of the last inputs of its convolution a layer keeps, and their width."""

    @property
    def memory(self) -> int:
        """Returns how many float32 numbers a layer keeps besides."""


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The states of one layer in all slots. Each form of a layer orders the elements of `memory` in its own way."""

    tail: Tensor  # [slots, *shape.tail] in the dtype of the model
    memory: Tensor  # [slots, shape.memory] float32

    @classmethod
    def zeros(cls, shape: RecurrentShape, slots: int, dtype: torch.dtype, device: torch.device) -> "RecurrentState":
        return cls(
            torch.zeros(slots, *shape.tail, dtype=dtype, device=device), torch.zeros(slots, shape.memory, device=device)
        )


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots that the S sequences of a step read and write, and their rows.

    A slot that one sequence writes must not be read in the same step, nor be written by another sequence. Dummy
    sequences and padding of captured steps may all write the scratch slot: on a GPU, where states stay in registers
    until the end, their outputs are right even so; the C library keeps states in the written slot meanwhile.
    """

    read: Tensor  # [S] int32, or NO_STATE
    write: Tensor  # [S] int32
    query_start_loc: Tensor  # [S + 1] int32: the first row of each sequence, and the number of all rows


def padded_numbers(matrices: tuple[int, int, int]) -> int:
    """Returns how many numbers a slot has. matrices: their count, rows and columns."""
    count, rows, columns = matrices
    return count * rows * -(-columns // COLUMNS) * COLUMNS
