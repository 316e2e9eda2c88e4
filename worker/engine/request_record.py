"""The record of a request: its sequence, and all results other than tokens, so that they can be sent again."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared import messages as m
from worker.engine.step_builder import StepBuilder
from worker.schedule.sequence import Sequence

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.run.pooling import PromptVector


@dataclass(slots=True)
class RequestRecord:
    """An admitted request. The record is kept for some time after the request has ended."""

    sequence: Sequence
    end: m.End | None = None
    logprobs: list[m.Logprobs] = field(default_factory=list)
    vector: "PromptVector | None" = None  # collects the rows of a request with `pooling`; None after its end
    pooled: m.Pooled | None = None  # the result of a request with `pooling`

    def expects(self, logprobs: m.Logprobs) -> bool:
        """Whether log-probabilities belong to the output: not if the sequence left, or lost their id by preemption."""
        return self.end is None and (logprobs.prompt or logprobs.start < self.sequence.output_len)

    def send_again(self, builder: StepBuilder, offset: int) -> None:
        """Adds the output from token `offset` on, and the End if the request has ended."""
        sequence, id = self.sequence, self.sequence.key[1]
        builder.admitted.append(m.Admitted(id, sequence.seed))
        builder.logprobs += [lp for lp in self.logprobs if lp.prompt or lp.start + len(lp.chosen) // 4 > offset]
        builder.add(id, offset, sequence.tokens[sequence.prompt_len + offset :])
        if self.pooled is not None:
            builder.pooled.append(self.pooled)
        if self.end is not None:
            builder.ends.append(self.end)

    def finish_vector(self, builder: StepBuilder) -> tuple[m.Outcome, str]:
        """Adds the vector of a request whose prompt is computed. Returns the outcome, and the error if it failed."""
        assert self.vector is not None
        try:
            self.pooled = m.Pooled(self.sequence.key[1], self.vector.values())
        except ValueError as error:
            return m.Outcome.ERROR, str(error)
        builder.pooled.append(self.pooled)
        return m.Outcome.POOLED, ""


def new_record(sequence: Sequence) -> RequestRecord:
    """Returns the record of a request that is about to be queued."""
    if sequence.pooling is None:
        return RequestRecord(sequence)
    from worker.run.pooling import PromptVector

    return RequestRecord(sequence, vector=PromptVector(sequence.pooling))
