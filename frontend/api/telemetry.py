"""llama.cpp's `timings` and `prompt_progress`, in its own responses and in the events of OpenAI's formats."""

import time
from collections.abc import Sequence

from frontend.request import Delta, Telemetry
from frontend.schema.base import ResponseModel, to_json
from frontend.schema.responses import Size
from shared.messages import Timings

SEPARATOR = b"\n\n"  # stands between two events; encoded JSON contains no line breaks


class LlamaCppTimings(ResponseModel):
    """The numbers of computed prompt tokens, cached prompt tokens and output tokens, with times in milliseconds."""

    cache_n: Size
    prompt_n: Size
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Size
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCppProgress(ResponseModel):
    total: Size
    cache: Size
    processed: Size
    time_ms: float


def timings(cached: int, computed: int, prompt_ms: float, predicted: int, decode_ms: float) -> LlamaCppTimings:
    """Makes the timings.

    cached, computed: numbers of prompt tokens; predicted: number of output tokens
    prompt_ms: time until the first output token; decode_ms: time from the first output token to the last
    The prefill yields the first output token, so the decode rate does not count it.
    """
    decoded, prompt_ms, decode_ms = max(0, predicted - 1), round(prompt_ms, 3), round(decode_ms, 3)
    return LlamaCppTimings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, computed),
        prompt_per_second=_ratio(1e3 * computed, prompt_ms),
        predicted_n=predicted,
        predicted_ms=decode_ms,
        predicted_per_token_ms=_ratio(decode_ms, decoded),
        predicted_per_second=_ratio(1e3 * decoded, decode_ms),
    )


def _ratio(amount: float, of: float) -> float:
    return amount / of if of else 0.0


class TelemetryEvents:
    """Adds llama.cpp's fields to the encoded events of a stream in another API format.

    prompt_tokens: the number of tokens of all prompts together
    opening: how many events precede the answer; they get no timings, and the last one of them gets the progress
    """

    def __init__(self, asked: Telemetry, prompt_tokens: int, opening: int) -> None:
        self._asked, self._prompt_tokens = asked, prompt_tokens
        self._opening, self._written = opening, 0
        self._predicted = 0
        self._first = 0.0  # time of the first tokens
        self._last = 0.0
        self._started: dict[int, Timings] = {}

    def added(self, events: bytes, deltas: Sequence[Delta]) -> bytes:
        """Returns the events with the added fields. deltas: the deltas that the events were made from"""
        for delta in deltas:
            self._add(delta)
        return SEPARATOR.join([self._with_fields(event) for event in events.split(SEPARATOR)])

    def _add(self, delta: Delta) -> None:
        if delta.timings is not None:
            self._started[delta.index] = delta.timings
        if delta.ids:
            self._predicted += len(delta.ids)
            self._last = time.perf_counter()
            self._first = self._first or self._last

    def _with_fields(self, event: bytes) -> bytes:
        if not event.endswith(b"}"):
            return event  # the end mark of the stream, or the empty part after the last separator
        fields, at = b"", self._written
        self._written += 1
        if self._asked.progress and at == max(0, self._opening - 1):
            fields += b',"prompt_progress":' + to_json(self._progress())
        if self._asked.timings and at >= self._opening and b',"timings":' not in event:
            fields += b',"timings":' + to_json(self._timings())
        return event[:-1] + fields + b"}"

    @property
    def _cached(self) -> int:
        return sum(one.cached_tokens for one in self._started.values())

    @property
    def _prompt_ms(self) -> float:
        return max((one.prefill_ms for one in self._started.values()), default=0.0)

    def _progress(self) -> LlamaCppProgress:
        total = self._prompt_tokens
        return LlamaCppProgress(total=total, cache=self._cached, processed=total, time_ms=self._prompt_ms)

    def _timings(self) -> LlamaCppTimings:
        computed = max(0, self._prompt_tokens - self._cached)
        return timings(self._cached, computed, self._prompt_ms, self._predicted, 1e3 * (self._last - self._first))
