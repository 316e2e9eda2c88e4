"""Kinds of steps: a batch of plain decodes, and batches in which one sequence is something else.

A server sees mixed batches most of the time. So they are measured beside plain batches, which shows what one such
sequence costs all the others.
"""

from dataclasses import dataclass

from bench.gpu.setup.harness import Harness
from shared.messages import Sampling
from worker.grammar.matcher import Restriction

CHUNK = 64  # tokens of the prompt chunk that a mixed step has beside its decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """How a batch decodes, and in what one of its sequences differs.

    temperature, top_p: of all sequences. logprobs: one returns the log-probabilities of so many tokens. constrained:
    one has a grammar. penalized: one has a repetition penalty. chunk: every step also computes so many tokens of a
    further prompt.
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
    """A constraint that forbids nothing and still masks each row: a grammar's work on the device, without a grammar."""

    __slots__ = ()
    state = None
    ended, masks, idle, error = False, True, False, ""

    def accept(self, token: int) -> bool:
        return True

    def copy(self) -> "AllowAll":
        return self


def start(harness: Harness, kind: StepKind, batch: int, context: int, steps: int) -> None:
    """Replaces all sequences by `batch` decodes of `context` tokens each, for at least `steps` steps of this kind.

    A kind with a chunk needs a harness with `step_tokens` of that size and with one more slot.
    """
    penalty = 1.1 if kind.penalized else 1.0
    sampling = {"temperature": kind.temperature, "top_p": kind.top_p}
    harness.add_decoding(batch, context, **sampling, logprobs=kind.logprobs, repetition_penalty=penalty)
    if kind.constrained:
        next(iter(harness.scheduler.sequences())).constraint = AllowAll()
    if kind.chunk:
        tokens = kind.chunk * steps  # one prompt begins when the one before it has ended
        prompts = [harness.prompt(min(context, tokens - first)) for first in range(0, tokens, context)]
        harness.submit(prompts, Sampling(1, temperature=0.0))
