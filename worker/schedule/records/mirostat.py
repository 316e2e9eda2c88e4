"""What Mirostat knows of a sequence (worker/run/samplers/mirostat.py computes it).

What is drawn next depends on how surprising each token so far was. A resumed stream, or an answer that is continued,
therefore computes its output again from the first token on, with the ids that are known.
"""

from dataclasses import dataclass, field

from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class MirostatRecord:
    """The state of Mirostat.

    forced: the ids that the output begins with, whatever is drawn; bounds: mu for each output token, in bits;
    shares: the probabilities that the latest token was drawn from, by id.
    """

    forced: list[int]
    bounds: list[float]
    shares: dict[int, float] = field(default_factory=dict)


def begin(sequence: Sequence) -> None:
    """Gives a new sequence its record, and has the output that it brings computed again."""
    chain = sequence.sampling.chain
    assert chain is not None
    forced = sequence.tokens[sequence.prompt_len :]
    sequence.mirostat = MirostatRecord(forced, [2 * chain.mirostat_tau])
    del sequence.tokens[sequence.prompt_len :]
    if forced and sequence.check is None:
        from worker.schedule.records.replay import replay

        replay(sequence, forced)
