"""Tests that recurrent layers of every kind give the same bits however a sequence is cut, and in any company."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.ops.recurrent_state import NO_STATE, RecurrentState, StateSlots
from worker.spec import RecurrentShape

Ints = Sequence[int]


def slots(read: Ints, write: Ints, starts: Ints) -> StateSlots:
    """Returns the state slots of a step. starts: the first row of each sequence, and then the number of all rows"""
    return StateSlots(*(torch.tensor(numbers, dtype=torch.int32) for numbers in (read, write, starts)))


class RecurrentLayer(ABC):
    """A layer with its states, and inputs of one sequence."""

    def __init__(self, shape: RecurrentShape, x: Tensor) -> None:
        """x: [T, sum of the widths of the input's projections]. The states are NaN, as if never written."""
        self.x, self.state = x, RecurrentState.zeros(shape, 16, x.dtype, torch.device("cpu"))
        self.state.memory.fill_(torch.nan)
        self.state.tail.fill_(torch.nan)

    @abstractmethod
    def run(self, x: Tensor, slots: StateSlots) -> Tensor:
        """Computes a step."""

    def in_chunks(self, cuts: Ints) -> Tensor:
        """Computes the sequence in chunks that end at `cuts`. The state alternates between slots 1 and 2."""
        outputs, read, start = [], NO_STATE, 0
        for number, end in enumerate(cuts):
            write = 1 + number % 2
            outputs.append(self.run(self.x[start:end], slots([read], [write], [0, end - start])))
            read, start = write, end
        return torch.cat(outputs)


def assert_any_cut_and_any_threads_give_the_same_bits(layer: RecurrentLayer) -> None:
    """Asserts it for a layer with 37 rows. Changes torch's number of threads."""
    whole = layer.in_chunks([37])
    for cuts in ([1, 2, 3, 4, 37], [2, 18, 19, 37], list(range(1, 38))):
        assert torch.equal(layer.in_chunks(cuts), whole)
    torch.set_num_threads(1)
    assert torch.equal(layer.in_chunks([20, 37]), whole)


def assert_company_changes_no_bit(layer: RecurrentLayer) -> None:
    """Runs one step with sequences of 1, 5, 0 and 31 rows, three of which continue from the same state."""
    run, x, state = layer.run, layer.x, layer.state
    run(x[:6], slots([NO_STATE], [3], [0, 6]))
    alone = [
        run(x[6:7], slots([3], [4], [0, 1])),
        run(x[7:12], slots([3], [5], [0, 5])),
        run(x[6:37], slots([NO_STATE], [6], [0, 31])),
    ]
    states = state.memory[4:7].clone(), state.tail[4:7].clone()
    rows = torch.cat((x[6:7], x[7:12], x[6:37]))
    together = run(rows, slots([3, 3, 3, NO_STATE], [7, 8, 9, 10], [0, 1, 6, 6, 37]))
    assert torch.equal(together, torch.cat(alone))
    written = state.memory[[7, 8, 10]], state.tail[[7, 8, 10]]
    assert all(map(torch.equal, states, written))
    assert state.memory[9].isnan().all() and state.tail[9].isnan().all(), "a sequence without rows writes nothing"


def assert_cuts_and_a_twin_change_no_bit(layer: RecurrentLayer) -> None:
    """Checks chunks and company of a layer with 9 rows, as cheaply as possible for the slow interpreter."""
    whole, parts = layer.in_chunks([9]), layer.in_chunks([1, 3, 4, 9])
    assert torch.equal(parts, whole)
    twice = layer.run(torch.cat((layer.x, layer.x)), slots([NO_STATE, NO_STATE], [5, 6], [0, 9, 18]))
    assert torch.equal(twice, torch.cat((whole, whole)))
    assert torch.equal(layer.state.memory[5].nan_to_num(), layer.state.memory[2].nan_to_num())
    assert torch.equal(layer.state.tail[6], layer.state.tail[2])


def assert_a_step_can_be_repeated(layer: RecurrentLayer) -> None:
    layer.run(layer.x[:6], slots([NO_STATE], [1], [0, 6]))
    once, again = (layer.run(layer.x[6:9], slots([1], [2], [0, 3])) for _ in range(2))
    assert torch.equal(once, again)
