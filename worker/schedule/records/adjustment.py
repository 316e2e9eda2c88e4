"""Adjustments of a sequence's logits other than grammars: penalties, biases, min_tokens, or a chain of samplers."""

import sys
from array import array

from shared.messages import Sampling
from worker.schedule.records.token_counts import TokenCounts


class Adjustment:
    """How long the logits of a sequence are adjusted, its biases, and the counts of its tokens for penalties.

    until: the length of the sequence, in tokens, from which on its logits are no longer adjusted
    biased, biases: the token ids with a bias, [B] as C int64, each once, and what is added to their logits, [B] as C
        float32
    """

    __slots__ = ("_counts", "biased", "biases", "until")

    def __init__(self, until: int, logit_bias: tuple[tuple[int, float], ...] = ()) -> None:
        """logit_bias: (id, bias); of equal ids, the last one counts"""
        last = dict(logit_bias)
        self.until = until
        self.biased, self.biases = array("q", last), array("f", last.values())
        self._counts: TokenCounts | None = None

    def counts_before(
        self, output: int, tokens: list[int], prompt_len: int, answer: list[int] | None = None
    ) -> TokenCounts:
        """Counts the tokens that precede output token `output` if all drafts before it are right.

        tokens: prompt and output. answer: the ids that the output is compared with; they are also the drafts.

        The result is the same object at each call: a call only adds the new tokens to it. If a call asks for fewer
        tokens than the last one, as after a failed step, everything is counted again.
        """
        text, begin = (tokens, prompt_len) if answer is None else (answer, 0)
        end = len(text) - begin if answer is None else min(output, len(text))
        if self._counts is None or self._counts.outputs > end:
            self._counts = TokenCounts(tokens[:prompt_len])
        self._counts.add(text[begin + self._counts.outputs : begin + end])
        return self._counts


def adjustment(sampling: Sampling, prompt_len: int) -> Adjustment | None:
    """Returns the adjustment that a request asks for; None if nothing adjusts its logits."""
    if sampling.penalized or sampling.logit_bias or sampling.chain is not None:
        return Adjustment(sys.maxsize, sampling.logit_bias)
    return Adjustment(prompt_len + sampling.min_tokens) if sampling.min_tokens else None


def with_biases_of(target: Adjustment | None, own: Adjustment | None) -> Adjustment | None:
    """Returns the adjustment of a drafter's copy of a sequence, with the biases of the target."""
    if target is None or not len(target.biased):
        return own
    adjusted = own or Adjustment(sys.maxsize)
    adjusted.until, adjusted.biased, adjusted.biases = sys.maxsize, target.biased, target.biases
    return adjusted
