"""Steps of recurrent layers: one sequence in chunks, and several sequences together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.kernels.recurrent_state import NO_STATE, RecurrentState

Run = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # inputs, slots to read and to write, where sequences start


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def in_chunks(run: Run, x: Tensor, cuts: Sequence[int]) -> Tensor:
    """Computes a sequence in chunks that end at `cuts`. Slots 1 and 2 take turns."""
    outputs, read, start = [], NO_STATE, 0
    for number, end in enumerate(cuts):
        write = 1 + number % 2
        outputs.append(run(x[start:end], slots(read), slots(write), slots(0, end - start)))
        read, start = write, end
    return torch.cat(outputs)


def assert_company_changes_no_bit(run: Run, x: Tensor, state: RecurrentState) -> None:
    """Sequences of 1, 5, 0 and 31 rows in one step, of which two continue; two read the same state. x: of 37 rows."""
    first = run(x[:6], slots(NO_STATE), slots(3), slots(0, 6))
    alone = [
        run(x[6:7], slots(3), slots(4), slots(0, 1)),
        run(x[7:12], slots(3), slots(5), slots(0, 5)),
        run(x[6:37], slots(NO_STATE), slots(6), slots(0, 31)),
    ]
    states = state.memory[4:7].clone(), state.tail[4:7].clone()
    rows = torch.cat((x[6:7], x[7:12], x[6:37]))
    together = run(rows, slots(3, 3, 3, NO_STATE), slots(7, 8, 9, 10), slots(0, 1, 6, 6, 37))
    assert len(first) == 6 and torch.equal(together, torch.cat(alone))
    written = state.memory[[7, 8, 10]], state.tail[[7, 8, 10]]
    assert all(map(torch.equal, states, written))
