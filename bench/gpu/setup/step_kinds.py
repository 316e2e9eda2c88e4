"""Kinds of steps: a batch of plain decodes, and mixed batches, in which one sequence differs.

Most batches of a server are mixed. So mixed batches are measured beside plain batches. This shows by how much one
different sequence slows down all others.
"""

from dataclasses import dataclass

from bench.gpu.setup.harness import Harness
from shared.messages import Sampling
from worker.structured_output.matcher import Restriction

CHUNK = 64  # tokens of the prompt chunk in a step with a chunk and decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """The sampling of a batch, and the feature that one of its sequences has.

    temperature, top_p: apply to all sequences. logprobs: number of log-probabilities that one sequence returns.
    constrained: whether one sequence has a grammar. penalized: whether one sequence has a repetition penalty. chunk:
    number of tokens of another prompt that every step also computes.
    """

    name: str
    temperature: float = 0.0
    top_p: float = 1.0
    logprobs: int | None = None
    constrained: bool = False
    penalized: bool = False
    chunk: int = 0


GREEDY = StepKind(name="")
DRAWN = StepKind(name="drawn with temperature and top-p", temperature=0.8, top_p=0.95)
MIXED = (
    StepKind(name="one with log-probabilities", logprobs=5),
    StepKind(name="one with a grammar", constrained=True),
    StepKind(name="one with a penalty", penalized=True),
    StepKind(name=f"and {CHUNK} tokens of a prompt", chunk=CHUNK),
)


class AllowAll(Restriction):
    """A constraint that masks each row but forbids no token. It causes a grammar's work on the device, but none on the
    host."""

    __slots__ = ()
    state = None
    ended, masks, idle, error = False, True, False, ""

    def accept(self, token: int) -> bool:
        return True

    def copy(self) -> "AllowAll":
        return self

    def forced(self, limit: int) -> tuple[int, ...]:
        return ()


def start(harness: Harness, kind: StepKind, batch: int, context: int, steps: int) -> None:
    """Replaces all sequences by `batch` decodes of `context` tokens each, for at least `steps` steps of this kind.

    A kind with a chunk needs a harness whose `step_tokens` equals the chunk's size, and one more slot.
    """
    penalty = 1.1 if kind.penalized else 1.0
    sampling = {"temperature": kind.temperature, "top_p": kind.top_p}
    harness.add_decoding(batch, context, **sampling, logprobs=kind.logprobs, repetition_penalty=penalty)
    if kind.constrained:
        next(iter(harness.scheduler.sequences())).constraint = AllowAll()
    if kind.chunk:
        tokens = kind.chunk * steps  # the chunks of all steps; their prompts run one after another
        prompts = [harness.prompt(min(context, tokens - first)) for first in range(0, tokens, context)]
        harness.submit(prompts, Sampling(1, temperature=0.0))
