"""Adds log-probabilities to deltas: those of output tokens to their delta, the prompt's to the last delta."""

import math

from frontend.generation.choice import Choice
from frontend.request import Delta, GenerationRequest, TokenLogprob
from shared.messages import Logprobs
from shared.wire.codec import unpack_f32, unpack_u32

ByOffset = dict[int, TokenLogprob]


class TokenScores:
    """Keeps the log-probabilities of one choice until their delta is sent."""

    def __init__(self, request: GenerationRequest) -> None:
        self._tells_output = request.sampling.logprobs is not None
        self._prompt_top = request.features.prompt_logprobs  # None: no log-probabilities of the prompt are requested
        self._told = request.brought  # the offset of the next token in the output
        self._output: ByOffset = {}
        self._prompt: ByOffset = {}

    def add(self, choice: Choice, delta: Delta) -> None:
        for logprobs in choice.logprobs:
            _store(logprobs, self._prompt if logprobs.prompt else self._output)
        choice.logprobs = []
        if self._tells_output:
            delta.logprobs = _taken(self._output, delta.ids, self._told)
        self._told += len(delta.ids)
        if delta.finish is not None and self._prompt_top is not None:
            delta.add().prompt_logprobs = self.of_prompt(choice.prompt, self._prompt_top)

    def of_prompt(self, prompt: list[int], most: int | None) -> list[TokenLogprob]:
        """Returns the prompt's log-probabilities. most: how many likely tokens each lists; None: all that are known."""
        every = _taken(dict(self._prompt), prompt, 0)
        return [TokenLogprob(one.token_id, one.logprob, one.top[:most], one.rank) for one in every]


def _store(logprobs: Logprobs, into: ByOffset) -> None:
    chosen, ranks = unpack_f32(logprobs.chosen), unpack_u32(logprobs.ranks)
    ids, values, k = unpack_u32(logprobs.top_ids), unpack_f32(logprobs.top_logprobs), logprobs.top
    for i, logprob in enumerate(chosen):
        top = tuple(zip(ids[i * k : i * k + k], values[i * k : i * k + k], strict=True))
        into[logprobs.start + i] = TokenLogprob(-1, logprob, top, ranks[i] if ranks else 0)


def _taken(logprobs: ByOffset, ids: list[int], start: int) -> list[TokenLogprob]:
    """Removes and returns one log-probability per id. A token without score (a prompt's first token) gets NaN."""
    taken = [logprobs.pop(start + i, None) for i in range(len(ids))]
    return [
        TokenLogprob(id, math.nan) if entry is None else TokenLogprob(id, entry.logprob, entry.top, entry.rank)
        for id, entry in zip(ids, taken, strict=True)
    ]
