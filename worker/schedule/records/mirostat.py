"""The state of the Mirostat sampler for a sequence (worker/run/samplers/mirostat.py computes it).

The next token depends on how surprising each earlier output token was. A resumed stream, or an answer that is
continued, therefore computes its output again from the first token on, with the ids that are known.
"""

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class MirostatRecord:
    """The state of Mirostat.

    forced: the known ids of the beginning of the output, which replace those that are drawn.
    bounds: mu for each output token, in bits.
    ids, shares: the tokens that the latest token was drawn from, [N] as C uint32 in ascending order, and their
        probabilities, [N] as C float64. A dict of them would take ten times as much memory: 18 MiB of 152,000 tokens.
    """

    forced: list[int]
    bounds: list[float]
    ids: "array[int]" = field(default_factory=lambda: array("I"))
    shares: "array[float]" = field(default_factory=lambda: array("d"))

    def share(self, id: int) -> float | None:
        """Returns the probability with which a token was drawn; None if it was not among the candidates."""
        at = bisect_left(self.ids, id)
        return self.shares[at] if at < len(self.ids) and self.ids[at] == id else None


def begin(sequence: Sequence) -> None:
    """Gives a new sequence its record. If the sequence comes with output, this output will be computed again."""
    chain = sequence.sampling.chain
    assert chain is not None
    forced = sequence.tokens[sequence.prompt_len :]
    sequence.mirostat = MirostatRecord(forced, [2 * chain.mirostat_tau])
    del sequence.tokens[sequence.prompt_len :]
    if forced and sequence.check is None:
        from worker.schedule.records.replay import replay

        replay(sequence, forced)
