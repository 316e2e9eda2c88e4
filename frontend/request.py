"""The frontend's vocabulary: a validated request in any API format, and the deltas that its response is made of.

A module of `api/` parses bytes into a `GenerationRequest`; `generation/` turns that into lists of `Delta`; the same
module of `api/` writes the Deltas in its format. No other module knows both HTTP and tokens.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from frontend.features import NO_FEATURES, Features, Telemetry
from frontend.output_parser.formats import ParserConfig
from shared.messages import Logprobs, Sampling, Timings


class Finish(enum.StrEnum):
    """Why a choice ended with success (failures are exceptions, never a Finish)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    POOLED = "pooled"  # its vector is here
    CHECKED = "checked"  # its tokens were compared with a given answer, up to the first that differs


@dataclass(frozen=True, slots=True)
class Shown:
    """What a response shows besides the text of its choices."""

    usage: bool = False  # a stream has the usage in a last chunk
    continuous_usage: bool = False  # a stream has the usage in every chunk
    timings: bool = False  # the response includes timings
    telemetry: Telemetry | None = None  # with it, a choice's first delta has the worker's timings so far
    ids: bool = False  # the response has token ids
    tokens_as_ids: bool = False  # log-probabilities name tokens by id
    stop: bool = False  # a choice ends with the stop string that ended it
    specials: bool = False  # text shows special tokens
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a request stands among others. `priority` is that of shared.messages.Submit."""

    cache_salt: str = ""  # as the client sent it
    deadline_ms: int = 0  # counted from the arrival of the request; 0 if there is no deadline
    priority: int = 0
    tenant: str = ""  # the name of the request's API key, and the fairness id of a gateway
    fingerprint: str = ""  # only workers with this fingerprint may compute it; "": any, but the same for all sequences


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request in any API format, tokenized and validated.

    Choice `i` of the response belongs to prompt `i // n`.
    """

    prompts: tuple[list[int], ...]  # token ids; no prompt is empty
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    model: str = ""
    parser_config: ParserConfig | None = None  # None: all of the output is text
    shown: Shown = Shown()
    admission: Admission = Admission()
    features: Features = NO_FEATURES
    format_data: Any = None  # what only this API format's response needs, as a record of the format's own

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the worker is given. A prompt counts once, however many choices continue it."""
        return sum(map(len, self.prompts)) + self.brought

    @property
    def brought(self) -> int:
        """How many tokens of output the request brings, which each choice goes on from."""
        return len(self.features.continued)

    def admitted(self, **changes: Any) -> Self:
        """Returns the request with these fields of its `admission` changed."""
        return replace(self, admission=replace(self.admission, **changes))


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    continued_tokens: int = 0  # those of the prompt that are earlier output, which this output continues
    reasoning_tokens: int | None = None  # of the completion's; None where nobody counts them
    predicted: tuple[int, int] | None = None  # tokens of a `prediction` that were accepted, and that were rejected

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and the likeliest tokens in its place (`top`), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # of a prompt's token among all tokens, from 1 on

    @property
    def top_with_token(self) -> tuple[tuple[int, float], ...]:
        """`top` and, if it is not among them, the token itself."""
        among = any(id == self.token_id for id, _ in self.top)
        return self.top if among else (*self.top, (self.token_id, self.logprob))


class Extras(msgspec.Struct, gc=False):
    """What only some features add to a delta. All but `before` come together with `finish`."""

    before: Sequence[str] = ()  # in the first delta, if the output goes on from another: the texts of its tokens
    prompt_logprobs: list[TokenLogprob] | None = None  # NaN for the first token
    output: list[int] | None = None  # all ids of the output, for a receipt
    scores: Sequence[Logprobs] = ()  # the log-probabilities of the prompt, as the worker sent them
    vector: bytes = b""  # packed float32
    predicted: tuple[int, int] | None = None  # drafts of an expected output: accepted, and rejected


NO_EXTRAS = Extras()  # to read from, never to write to


class Delta(msgspec.Struct, gc=False):
    """What one choice gained since its last Delta.

    `texts[i]` is what token `ids[i]` added to the text: empty while a character is incomplete, cut where a stop string
    began. The last Delta of a choice has `finish`, `timings` and `seed`; `stop` is the string or id that ended it.
    """

    index: int
    ids: list[int]
    texts: list[str]
    finish: Finish | None = None
    stop: str | int | None = None
    matched_stop: str | int | None = None  # like `stop`, but the last token's id if the model or a grammar ended it
    usage: Usage | None = None  # of this choice so far
    logprobs: list[TokenLogprob] | None = None
    timings: Timings | None = None  # set together with `finish`, and in the first one if the request asks for the start
    seed: int | None = None
    added: Extras | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def extras(self) -> Extras:
        """What features have added. For reading only."""
        return self.added or NO_EXTRAS

    def add(self) -> Extras:
        """Returns what features have added, for the caller to add to."""
        if self.added is None:
            self.added = Extras()
        return self.added
