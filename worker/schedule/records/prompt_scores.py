"""Scores of a prompt: the log-probabilities of its own tokens (worker/run/logprobs.py)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Which tokens of its prompt a sequence scores. A token is scored by the row before it."""

    start: int = 0  # only the tokens from this index on

    @property
    def cacheable_tokens(self) -> int:
        """How many tokens may come from the prefix cache. The rows of all others give scores."""
        return max(0, self.start - 1)
