"""The extras of a choice: functions that change its deltas for the optional features of a request.

Only this module knows which module implements a feature. It imports a feature's module when the first request asks for
it. A request without optional features has no extras.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from frontend.generation.generation import Choice, Extra
from frontend.request import Delta, Features, Finish, GenerationRequest, ResponseOptions, TokenLogprob
from frontend.text.detokenizer import OutputText
from shared.messages import Logprobs
from shared.wire import unpack_f32, unpack_u32


def extras_of(
    request: GenerationRequest, index: int, text: OutputText, new_text: Callable[[], OutputText]
) -> list[Extra]:
    """Returns the extras of choice `index`, in the order in which they change a delta.

    text: the detokenizer of the choice, before its first token
    new_text: makes a detokenizer for the prompt, which finds no stop strings and shows no special tokens
    """
    features, sampling, extras = request.features, request.sampling, list[Extra]()
    if features.continued:
        extras.append(Continued(features.continued, text))
    if features.indent:
        extras.append(Indentation(features.indent, text))
    if features.output_ms:
        extras.append(TimeLimit(features.output_ms))
    if sampling.logprobs is not None or features.prompt_logprobs is not None:
        scores = TokenScores(request)
        extras.append(scores.add)
    else:
        scores = None
    if features.echo:
        extras.append(Echo(request, index, new_text(), scores))
    if request.shown.telemetry or request.shown.continuous_usage:
        extras.append(Progress(request.shown))
    if features.receipt or features.pooling or features.scored or features.predicted is not None:
        extras += endings(features)
    return extras


# An output that continues an earlier one (`continue_from`). Its deltas do not repeat the earlier tokens.
#
# The earlier tokens go through the detokenizer and the search for stop strings first, because both must see the whole
# output. Some of these tokens may be held back there, and come out later together with new tokens. This part then
# removes them.


class Continued:
    """Removes the tokens of the earlier output from deltas, and keeps their text in `Extras.before`."""

    def __init__(self, ids: Sequence[int], text: OutputText) -> None:
        """text: the detokenizer of the choice; the ids of the earlier output are pushed into it here"""
        pushed, self._before, _ = text.push(list(ids))
        self._held = len(ids) - len(pushed)

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if self._held:
            old = min(len(delta.ids), self._held)
            self._held -= old
            self._before = [*self._before, *delta.texts[:old]]
            delta.ids, delta.texts = delta.ids[old:], delta.texts[old:]
        if self._before and (delta.ids or delta.texts or delta.finish is not None):
            delta.add().before, self._before = self._before, []


# Adds log-probabilities to deltas: those of output tokens to their delta, the prompt's to the last delta.
#
# A prompt may have a million of them. They stay packed, as the worker sent them, until they are written.

ByOffset = dict[int, TokenLogprob]


@dataclass(frozen=True, slots=True)
class _Run:
    """Unpacked columns of consecutive tokens; see shared.messages.events.Logprobs."""

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
        self._wants_output = request.sampling.logprobs is not None
        self._prompt_top = request.features.prompt_logprobs  # None: no log-probabilities of the prompt are requested
        self._offset = request.brought  # the offset of the next token in the output
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
        if self._wants_output:
            delta.logprobs = _taken(self._output, delta.ids, self._offset)
        self._offset += len(delta.ids)
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


# Puts the prompt before the output (`echo` of completions), with its log-probabilities if they are requested.


class Echo:
    """Puts the prompt, as the client wrote it, before the first delta of a choice."""

    def __init__(self, request: GenerationRequest, index: int, text: OutputText, scores: TokenScores | None) -> None:
        """text: decodes the prompt's tokens; scores: the log-probabilities of the choice, if requested"""
        prompt = index // request.n
        self._ids, self._texts, _ = text.finish(request.prompts[prompt])
        exact = request.features.echo[prompt]
        if exact and "".join(self._texts) != exact:  # decoding the ids does not give the client's text
            self._texts = [exact, *[""] * (len(self._ids) - 1)]
        self._scores, self._top = scores, request.sampling.logprobs
        self._done = False

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if self._done:
            return
        self._done = True
        if self._scores is not None and delta.logprobs is not None:
            delta.logprobs = self._scores.of_prompt(self._ids, self._top).followed_by([*delta.logprobs])
        delta.ids, delta.texts = self._ids + delta.ids, self._texts + delta.texts


# Adds data of optional features to the last delta: ids for a receipt, a vector, or a prompt's scores.


def endings(features: Features) -> list[Extra]:
    """Returns the extras for the requested features."""
    asked = (
        (features.receipt, _output), (features.pooling, _vector), (features.scored, _scores),
        (features.predicted is not None, _predicted),
    )  # fmt: skip
    return [extra for wanted, extra in asked if wanted]


def _output(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().output = choice.stream.output[: choice.text.consumed]


def _vector(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().vector = choice.stream.vector


def _scores(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().scores = choice.logprobs


def _predicted(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        end = choice.stream.end
        delta.add().predicted = (0, 0) if end is None or end.predicted is None else end.predicted


# Reports in a running stream: the usage so far, and the worker's times up to the first token.


class Progress:
    """Adds the usage to every delta and the times to the first delta, if the request asks for them."""

    def __init__(self, shown: ResponseOptions) -> None:
        self._usage, self._start = shown.continuous_usage, shown.telemetry is not None

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is not None or not (delta.ids or delta.texts):
            return
        if self._usage:
            delta.usage = choice.usage()
        if self._start:
            delta.timings, self._start = choice.timings(None), False


# A limit on the time that an output may take (llama.cpp's `t_max_predict_ms`).


class TimeLimit:
    """Ends a choice at its time limit, which counts from the first token, but not before its output has a line
    break."""

    def __init__(self, most_ms: int) -> None:
        self._most_ms = most_ms
        self._has_break = False

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is not None or choice.stream.end is not None:
            return
        self._has_break = self._has_break or any("\n" in text for text in delta.texts)
        if self._has_break and 1e3 * (choice.last_at - choice.first_at) > self._most_ms:
            held, rest, _ = choice.text.finish()
            delta.ids, delta.texts, delta.finish = [*delta.ids, *held], [*delta.texts, *rest], Finish.LENGTH


# The end of an output before a line that is indented less than wanted (llama.cpp's `n_indent`).


class Indentation:
    """Ends a choice before the first line, after its first one, with fewer than `least` blanks at its beginning.

    Such an end counts as a limit, as in llama.cpp.
    """

    def __init__(self, least: int, text: OutputText) -> None:
        self._lines = text.watch_lines(least)

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is Finish.STOP and delta.stop is not None and self._lines.is_line:
            delta.finish, delta.stop = Finish.LENGTH, None
