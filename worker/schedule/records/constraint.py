"""What the output of a sequence must keep to: the interface of grammars and of rules about tokens."""

from typing import Protocol

from worker.schedule.sequence import Sequence


class Constraint(Protocol):
    """A rule for the output of a sequence, and how far the output has got in it. `worker/grammar` implements rules."""

    def accept(self, token: int) -> bool:
        """Adds a sampled token to the output. Called once for each token that is kept.

        Returns False if the token does not fit; `error` then says why.
        """

    @property
    def ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def masks(self) -> bool:
        """Whether it forbids any token now."""

    @property
    def idle(self) -> bool:
        """Whether no later token can be forbidden any more."""

    @property
    def error(self) -> str: ...


def accept(sequence: Sequence, constraint: Constraint, id: int) -> bool:
    """Adds a sampled id to the constraint of a sequence. Returns False if the id does not fit it."""
    fits = constraint.accept(id)
    if fits and constraint.idle:
        sequence.constraint = None
    return fits
