"""The slots for recurrent states that one sequence has. features/states.py gives and takes back slots."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The slots of a sequence. A step from position `start` on reads slot `at[start]`, and writes slot `free[-1]`."""

    at: dict[int, int] = field(default_factory=dict)  # number of tokens → slot of the recurrent state after them
    free: list[int] = field(default_factory=list)  # slots of the sequence that hold no state now


def slots_of(sequence: "Sequence") -> SequenceStates:
    """Returns the slots of a running sequence of a model with recurrent layers."""
    assert sequence.states is not None, "a waiting sequence has no slots"
    return sequence.states
