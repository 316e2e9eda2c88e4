"""Scores of a prompt: the log-probabilities of the prompt's tokens (worker/run/logprobs.py)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Which prompt tokens of a sequence are scored. The logits of a token's row score the next token."""

    start: int = 0  # the index of the first token that is scored

    @property
    def cacheable_tokens(self) -> int:
        """How many tokens may come from the prefix cache, because their rows score no token."""
        return max(0, self.start - 1)
