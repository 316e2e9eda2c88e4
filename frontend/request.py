"""The frontend's common types: a validated request of any API format, and the deltas that its response is made of.

A module of `api/` parses bytes into a `GenerationRequest`. `generation/` turns it into lists of `Delta`, and the same
module of `api/` writes the Deltas in its format. No other module knows both HTTP and tokens.
"""

import enum
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from frontend.output_parser.model_format import ParserConfig
from shared.messages import Adapter, Logprobs, Pooling, PromptImage, Sampling, Timings

# The optional features of a request, one field for each. A request that only generates text has none.
#
# These are plain values. Each feature has a module in `frontend/generation/` that changes the answer. Only
# `frontend/generation/extras.py` knows which module belongs to which field.


@dataclass(frozen=True, slots=True)
class Scored:
    """Asks for the log-probabilities of each prompt instead of text."""

    starts: tuple[int, ...]  # for each prompt, the index of the first token that is scored


@dataclass(frozen=True, slots=True)
class Segments:
    """How texts for vectors are cut into prompts. The prompts of one text are neighbours.

    counts: for each text, how many prompts it has
    weights: for each prompt, its share of its text: the number of tokens; 1 for a text of one prompt
    """

    counts: tuple[int, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Which of llama.cpp's reports a stream contains."""

    timings: bool  # whether every event has timings
    progress: bool  # whether the stream begins with the progress of the prompt


@dataclass(frozen=True, slots=True)
class Features:
    """Optional features of a request, beyond plain generation."""

    continued: tuple[int, ...] = ()  # ids of the earlier output, which every choice continues without repeating it
    echo: tuple[str, ...] = ()  # each prompt's text, to be put before its choices; "" for a prompt of ids
    prompt_logprobs: int | None = None  # number of likeliest tokens to report per position; None: no log-probabilities
    output_ms: int = 0  # time limit from the first token on, which ends only an output with a line break; 0: none
    indent: int = 0  # how many blanks each line but the first must begin with, else the output ends; 0: any number
    receipt: bool = False  # whether the response has receipts
    checked: list[int] | None = None  # an output that is checked instead of generated; needs one prompt and n = 1
    scored: Scored | None = None
    adapter: Adapter | None = None  # the LoRA adapter, which changes the weights of the model
    images: tuple[PromptImage, ...] = ()  # the images of the request's only prompt
    predicted: tuple[int, ...] | None = None  # ids that the client expects as the output
    pooling: Pooling | None = None  # asks for one vector of each prompt instead of text
    seconds: tuple[int, ...] = ()  # for each prompt that is a pair of texts, where the second begins; empty: no pairs
    one_group: bool = False  # whether the prompts begin with the same tokens, which are then computed once
    segments: Segments | None = None  # asks for one vector of each text instead of each prompt


NO_FEATURES = Features()


class Finish(enum.StrEnum):
    """Why a choice ended with success. A failure is an exception and has no Finish."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    POOLED = "pooled"  # the vector of the choice's prompt is computed
    CHECKED = "checked"  # the choice's tokens were compared with a given answer, up to the first difference


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Which optional parts a response has besides the text of its choices."""

    usage: bool = False  # whether a stream ends with a chunk that has the usage
    continuous_usage: bool = False  # whether every chunk of a stream has the usage
    timings: bool = False  # whether the response has timings
    telemetry: Telemetry | None = None  # if set, a choice's first delta has the worker's timings up to then
    ids: bool = False  # whether the response has token ids
    tokens_as_ids: bool = False  # whether log-probabilities name tokens by id
    stop: bool = False  # whether a choice includes the stop string that ended it
    specials: bool = False  # whether the text shows special tokens
    reasoning: bool = True
    custom_tools: frozenset[str] = frozenset()  # the functions whose calls are shown as calls of custom tools


@dataclass(frozen=True, slots=True)
class Admission:
    """What decides when and where a request runs. `priority` means the same as in shared.messages.requests.Submit."""

    cache_salt: str = ""  # requests share cached prefixes only if they have the same salt
    deadline_ms: int = 0  # time limit from the arrival of the request; 0: no limit
    priority: int = 0
    tenant: str = ""  # name of the API key, and "/" and the fairness id if a gateway gave one
    fingerprint: str = ""  # what the workers' fingerprint must be; "": any, but the same for all sequences
    keep_s: int = 0  # for how long the K/V store should keep the prompt, in seconds; 0: as any other


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request of any API format, tokenized and validated.

    Choice `i` of the response belongs to prompt `i // n`.
    """

    prompts: tuple[list[int], ...]  # token ids; no prompt is empty
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    model: str = ""
    parser_config: ParserConfig | None = None  # None: the output is not parsed
    shown: ResponseOptions = ResponseOptions()
    admission: Admission = Admission()
    features: Features = NO_FEATURES
    param: str = "prompt"  # the name of the field with the prompts, for error messages
    format_data: Any = None  # a record of the API format with data for its response

    @property
    def prompt_tokens(self) -> int:
        """How many prompt tokens the worker gets. A prompt counts once, however many choices it has."""
        return sum(map(len, self.prompts)) + self.brought

    @property
    def brought(self) -> int:
        """How many tokens of earlier output the request contains, which each choice continues."""
        return len(self.features.continued)

    def admitted(self, **changes: Any) -> Self:
        """Returns the request with these fields of its `admission` changed."""
        return replace(self, admission=replace(self.admission, **changes))


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    continued_tokens: int = 0  # prompt tokens that are earlier output, see `continue_from`
    reasoning_tokens: int | None = None  # completion tokens that are reasoning; None: not counted
    predicted: tuple[int, int] | None = None  # how many tokens of a `prediction` were accepted and rejected

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and the likeliest tokens at its position (`top`), likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # for a token of a prompt: its place among all tokens by likelihood, from 1

    @property
    def top_with_token(self) -> tuple[tuple[int, float], ...]:
        """`top`, and the token itself if `top` does not contain it."""
        among = any(id == self.token_id for id, _ in self.top)
        return self.top if among else (*self.top, (self.token_id, self.logprob))


class Extras(msgspec.Struct, gc=False):
    """What optional features add to a delta. All fields except `before` are set together with `finish`."""

    before: Sequence[str] = ()  # texts of the tokens of an earlier output that this one continues; in the first delta
    prompt_logprobs: Sequence[TokenLogprob] | None = None  # NaN for the first token
    output: list[int] | None = None  # all ids of the output, for a receipt
    scores: Sequence[Logprobs] = ()  # the log-probabilities of the prompt, as the worker sent them
    vector: bytes = b""  # packed float32
    predicted: tuple[int, int] | None = None  # how many tokens of a `prediction` were accepted and rejected


NO_EXTRAS = Extras()  # read-only


class Delta(msgspec.Struct, gc=False):
    """The output of one choice since its last Delta.

    `texts[i]` is what token `ids[i]` added to the text: empty while a character is incomplete, cut where a stop string
    began. The last Delta of a choice has `finish`, `timings` and `seed`; `stop` is the string or id that ended it.
    """

    index: int
    ids: list[int]
    texts: list[str]
    finish: Finish | None = None
    stop: str | int | None = None
    matched_stop: str | int | None = None  # like `stop`, or the last token's id if the model or a grammar ended it
    usage: Usage | None = None  # the usage of this choice so far
    logprobs: Sequence[TokenLogprob] | None = None
    timings: Timings | None = None  # in the last delta and, if requested, in the first delta
    seed: int | None = None
    added: Extras | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def extras(self) -> Extras:
        """What optional features have added. For reading only."""
        return self.added or NO_EXTRAS

    def add(self) -> Extras:
        """Returns what optional features have added, so that the caller can add to it."""
        if self.added is None:
            self.added = Extras()
        return self.added


# Deviations from what a request asked for, which headers of the response report. They are here so that the middleware
# imports no grammars.


class Notes(msgspec.Struct, gc=False):
    """How the answer to one request deviates from what was asked for. A field that is None: no deviation."""

    not_enforced: dict[str, str] | None = None  # paths of keywords of JSON schemas that no grammar enforces, and why
    lowered: dict[str, int] | None = None  # the fields with limits that are cut to what is possible, and to what


notes: ContextVar[Notes | None] = ContextVar("notes", default=None)  # of the present request; None: nobody reads them


def report_dropped(found: Mapping[str, str]) -> None:
    """Notes keywords of JSON schemas for the response to the present request."""
    if (known := notes.get()) is not None:
        known.not_enforced = {**(known.not_enforced or {}), **found}


def report_lowered(field: str, limit: int) -> None:
    """Notes that a limit which the present request sets was lowered. limit: what it is now"""
    if (known := notes.get()) is not None:
        known.lowered = {**(known.lowered or {}), field: limit}
