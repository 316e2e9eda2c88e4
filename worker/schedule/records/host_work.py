"""How long the host takes for the rows of a sequence, besides the forward: samplers, grammar masks, log-probabilities.

The times are those of the latest rows. Before the first measurement, an assumed time stands for a row.
"""

from dataclasses import dataclass

from shared.messages import Sampling

CHAIN_S = 0.01  # assumed for each sampler of a row's chain: of 152,000 tokens, a sampler takes 1 to 12 ms
SCORED_S = 0.002  # assumed for a row of a prompt with log-probabilities
CHECKED_S = 0.002  # assumed for a row of an answer that is checked: a draw from 152,000 tokens takes 2 ms
MANY_S = 0.02  # assumed for a row with more likeliest tokens than FEW, which are sorted
FEW = 128


@dataclass(slots=True)
class HostWork:
    """Seconds that the host takes for one row of a sequence.

    chain, mask, scores: for a row that is sampled: its chain of samplers, the mask of its grammar or token rules, its
    log-probabilities. checked: for a row of an answer that is checked, whose rows are all sampled in one step: the draw
    and the chain together. prompt: for a row that scores a token of the prompt. measured, chained: whether `prompt` and
    `chain` were measured
    """

    chain: float = 0.0
    mask: float = 0.0
    scores: float = 0.0
    checked: float = 0.0
    prompt: float = 0.0
    measured: bool = False
    chained: bool = False

    @property
    def row(self) -> float:
        """Seconds for a row that is sampled."""
        return max(self.chain, self.checked) + self.mask + self.scores


def host_work(sampling: Sampling, *, checked: bool = False) -> HostWork | None:
    """Returns the work that the host has with a new sequence; None if it has hardly any.

    checked: whether an answer is compared with what the sequence would sample
    """
    chain, scores, prompt = sampling.chain, sampling.logprobs, sampling.prompt_logprobs
    if not (
        checked or chain is not None or prompt or scores is not None or sampling.grammar or sampling.has_token_rules
    ):
        return None
    samplers = 0 if chain is None else max(1, len(chain.order))
    return HostWork(
        chain=CHAIN_S * samplers,
        scores=MANY_S if (scores or 0) > FEW else 0.0,
        checked=CHECKED_S if checked else 0.0,
        prompt=SCORED_S if prompt else 0.0,
    )
