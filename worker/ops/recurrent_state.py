"""The state of fixed size that a recurrent layer keeps for a sequence, in place of K/V.

A step reads the state of a sequence from one slot and writes the new state to another slot, so a step can be repeated.
"""

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
