"""Adds log-probabilities to deltas: those of output tokens to their delta, the prompt's to the last delta.

A prompt may have a million of them. They stay packed, as the worker sent them, until they are written.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from frontend.generation.choice import Choice
from frontend.request import Delta, GenerationRequest, TokenLogprob
from shared.messages import Logprobs
from shared.wire.codec import unpack_f32, unpack_u32

ByOffset = dict[int, TokenLogprob]


@dataclass(frozen=True, slots=True)
class _Run:
    """Unpacked columns of consecutive tokens; see shared.messages.Logprobs."""

    start: int
    top: int
    chosen: "array[float]"
    ids: "array[int]"
    values: "array[float]"
    ranks: "array[int]"

    @classmethod
    def of(cls, logprobs: Logprobs) -> "_Run":
        return cls(
            logprobs.start, logprobs.top, unpack_f32(logprobs.chosen), unpack_u32(logprobs.top_ids),
            unpack_f32(logprobs.top_logprobs), unpack_u32(logprobs.ranks),
        )  # fmt: skip

    def token(self, id: int, at: int, most: int | None = None) -> TokenLogprob:
        """Returns the log-probabilities of the run's token number `at`, with at most `most` of the likeliest."""
        first, count = at * self.top, self.top if most is None else min(most, self.top)
        tops = slice(first, first + count)
        top = tuple(zip(self.ids[tops], self.values[tops], strict=True))
        return TokenLogprob(id, self.chosen[at], top, self.ranks[at] if self.ranks else 0)


class PromptScores(Sequence[TokenLogprob]):
    """The log-probabilities of a prompt's tokens, and of output tokens that follow. Made one by one as they are read.

    A token without score (a prompt's first token) has NaN.
    """

    def __init__(self, ids: list[int], runs: Sequence[_Run], most: int | None) -> None:
        """most: how many likely tokens each lists; None: all that are known"""
        self._ids, self._runs, self._most = ids, runs, most
        self._run_of = array("l", [-1]) * len(ids)
        for number, run in enumerate(runs):
            end = min(len(ids), run.start + len(run.chosen))
            self._run_of[run.start : end] = array("l", [number]) * max(0, end - run.start)
        self._after: list[TokenLogprob] = []

    def followed_by(self, after: list[TokenLogprob]) -> "PromptScores":
        """Returns these log-probabilities, and then those of output tokens."""
        self._after = after
        return self

    def __len__(self) -> int:
        return len(self._ids) + len(self._after)

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        if at >= len(self._ids):
            return self._after[at - len(self._ids)]
        id, number = self._ids[at], self._run_of[at]
        if number < 0:
            return TokenLogprob(id, math.nan)
        run = self._runs[number]
        return run.token(id, at - run.start, self._most)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(self.__getitem__, range(len(self)))


class TokenScores:
    """Keeps the log-probabilities of one choice until their delta is sent."""

    def __init__(self, request: GenerationRequest) -> None:
        self._tells_output = request.sampling.logprobs is not None
        self._prompt_top = request.features.prompt_logprobs  # None: no log-probabilities of the prompt are requested
        self._told = request.brought  # the offset of the next token in the output
        self._output: ByOffset = {}
        self._prompt: list[_Run] = []

    def add(self, choice: Choice, delta: Delta) -> None:
        for logprobs in choice.logprobs:
            run = _Run.of(logprobs)
            if logprobs.prompt:
                self._prompt.append(run)
            else:
                self._output |= {run.start + at: run.token(-1, at) for at in range(len(run.chosen))}
        choice.logprobs = []
        if self._tells_output:
            delta.logprobs = _taken(self._output, delta.ids, self._told)
        self._told += len(delta.ids)
        if delta.finish is not None and self._prompt_top is not None:
            delta.add().prompt_logprobs = self.of_prompt(choice.prompt, self._prompt_top)

    def of_prompt(self, prompt: list[int], most: int | None) -> PromptScores:
        """Returns the prompt's log-probabilities. most: how many likely tokens each lists; None: all that are known."""
        return PromptScores(prompt, self._prompt, most)


def _taken(logprobs: ByOffset, ids: list[int], start: int) -> list[TokenLogprob]:
    """Removes and returns one log-probability per id. A token without score gets NaN."""
    taken = [logprobs.pop(start + i, None) for i in range(len(ids))]
    return [
        TokenLogprob(id, math.nan) if entry is None else TokenLogprob(id, entry.logprob, entry.top, entry.rank)
        for id, entry in zip(ids, taken, strict=True)
    ]
