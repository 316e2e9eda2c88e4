"""Scores a model: how well it predicts a text, and how close its predictions are to those of the unquantized model."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Score:
    """Sums over all predicted tokens; the properties are means per token."""

    tokens: int = 0
    surprise: float = 0.0  # -log p of the token that follows in the text
    divergence: float = 0.0
    agreed: int = 0

    def add(self, full: Tensor, logits: Tensor, ids: Tensor) -> None:
        """Adds the predictions for one text.

        full: [T, vocab], log-probabilities of the unquantized model.
        logits: [T, vocab], from the model to score. ids: [T], the tokens that follow in the text.
        """
        got = logits.log_softmax(-1)
        self.tokens += len(ids)
        self.surprise -= got.gather(1, ids[:, None]).double().sum().item()
        self.divergence += (full.exp() * (full - got)).sum(-1).double().sum().item()
        self.agreed += int((full.argmax(-1) == logits.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)

    @property
    def kl(self) -> float:
        """KL(full || model) of the predicted distributions, in nats per token."""
        return self.divergence / self.tokens

    @property
    def agreement(self) -> float:
        """The share of tokens where the scored and the unquantized model have the same most likely token."""
        return self.agreed / self.tokens
