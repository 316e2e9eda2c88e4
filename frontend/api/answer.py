"""What a format writes a response from: its context, the answers so far, and usage and timings summed up over them."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from msgspec import UNSET, UnsetType

from frontend.errors import SluiceError
from frontend.request import Delta, Finish, GenerationRequest, Usage
from frontend.schema import responses
from frontend.text.tokenizer import Tokenizer
from shared.messages import Timings
from shared.signing import Signer


class Totals:
    """Accumulates the deltas of all choices into one usage and one set of timings."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.reasoning_tokens: int | None = None  # None: this response does not count them
        self._completion = [0] * (len(request.prompts) * request.n)
        self._cached: dict[int, int] = {}
        self._predicted: tuple[int, int] | None = None
        self._timings: list[Timings] = []
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []

    def add(self, delta: Delta) -> None:
        if self.request.shown.timings and delta.ids:
            self._tick(delta)
        if delta.usage is not None:
            self._completion[delta.index] = delta.usage.completion_tokens
        if delta.finish is not None and delta.usage is not None:
            prompt = delta.index // self.request.n
            cached = delta.usage.cached_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))
        if delta.timings is not None:
            self._timings.append(delta.timings)
        if delta.added is not None and delta.added.predicted is not None:
            (accepted, rejected), (more, less) = self._predicted or (0, 0), delta.added.predicted
            self._predicted = accepted + more, rejected + less

    def _tick(self, delta: Delta) -> None:
        now = time.perf_counter()
        last = self._last.get(delta.index)
        self._last[delta.index] = now
        if last is not None:
            self._gaps += [(now - last) * 1e3 / len(delta.ids)] * len(delta.ids)

    @property
    def usage(self) -> Usage:
        """The usage. The tokens of a prompt count once, however many choices it has."""
        request, cached = self.request, sum(self._cached.values())
        return Usage(
            request.prompt_tokens, sum(self._completion), cached, request.brought, self.reasoning_tokens,
            self._predicted,
        )  # fmt: skip

    @property
    def timings(self) -> responses.Timings | UnsetType:
        """The times, if requested: the largest of all choices. Times between tokens are measured in this process."""
        if not self.request.shown.timings:
            return UNSET
        gaps = sorted(self._gaps) or [0.0]
        return responses.Timings(
            queue_ms=self._slowest("queue_ms"),
            prefill_ms=self._slowest("prefill_ms"),
            decode_ms=self._slowest("decode_ms"),
            cached_tokens=sum(self._cached.values()),
            draft_tokens=sum(timings.drafts[0] for timings in self._timings),
            accepted_draft_tokens=sum(timings.drafts[1] for timings in self._timings),
            inter_token_p50_ms=round(gaps[len(gaps) // 2], 3),
            inter_token_p99_ms=round(gaps[len(gaps) * 99 // 100], 3),
        )

    def _slowest(self, part: str) -> float:
        return round(max((getattr(timings, part) for timings in self._timings), default=0.0), 3)


class Answer:
    """One of the answers (choices) of a request, as far as its deltas have arrived. Formats add what only they need."""

    def __init__(self, context: "ResponseContext", index: int = 0) -> None:
        self.context, self.index = context, index
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.texts += delta.texts
        self.ids += delta.ids
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def prompt(self) -> int:
        """The index of the answer's prompt."""
        return self.index // self.context.request.n

    @property
    def end(self) -> Delta:
        """The last delta. Raises SluiceError if the answer has not ended."""
        if self.last is None or self.last.finish is None:
            raise SluiceError(f"answer {self.index} has no end")
        return self.last

    @property
    def finish(self) -> Finish:
        """Why the answer has ended."""
        return cast(Finish, self.end.finish)


# Everything besides the deltas that is needed to write a response. Knows no API format.

AsyncDeltas = AsyncIterator[list[Delta]]  # each list holds all deltas that arrived since the previous list


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Everything besides the deltas that is needed to write a response."""

    request: GenerationRequest
    tokenizer: Tokenizer
    prefix: str = "cmpl"
    fingerprint: str = ""  # the server's fingerprint (shared/build.py); empty if the workers report none
    route: str = ""  # the path of the request
    signer: Signer | None = None  # signs receipts
    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    event_numbers: Iterator[int] = field(default_factory=count)  # for API formats that number their events

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.nonce}"

    @property
    def system_fingerprint(self) -> str | None:
        """The fingerprint as OpenAI's formats state it; None (in JSON null) if it is empty."""
        return self.fingerprint or None

    def token_text(self, id: int) -> str:
        """Returns the text that stands for a token in log-probabilities."""
        return f"token_id:{id}" if self.request.shown.tokens_as_ids else self.tokenizer.token_text(id)
