"""The interface of constraints on the output of a sequence: grammars and rules about tokens."""

from typing import Protocol

from worker.schedule.sequence import Sequence


class Constraint(Protocol):
    """A rule for the output of a sequence, and the position of the output in it. Implemented in `worker/grammar`."""

    def accept(self, token: int) -> bool:
        """Adds a sampled token to the output. Called once for each token that is kept.

        Returns False if the rule does not allow the token; `error` then says why.
        """

    @property
    def ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def masks(self) -> bool:
        """Whether the rule forbids any token at the present position."""

    @property
    def idle(self) -> bool:
        """Whether the rule will not forbid any token from now on."""

    @property
    def error(self) -> str: ...


def accept(sequence: Sequence, constraint: Constraint, id: int) -> bool:
    """Passes a sampled id to the constraint of a sequence. Returns False if the constraint does not allow the id."""
    fits = constraint.accept(id)
    if fits and constraint.idle:
        sequence.constraint = None
    return fits
