"""The frontend's vocabulary: a validated request in any API format, and the deltas that its response is made of.

A module of `api/` parses bytes into a `GenerationRequest`; `generation/` turns that into lists of `Delta`; the same
module of `api/` writes the Deltas in its format. No other module knows both HTTP and tokens.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.output_parser.formats import ParserConfig
from shared.messages import Logprobs, Pooling, Sampling, Timings


class Finish(enum.StrEnum):
    """Why a choice ended with success (failures are exceptions, never a Finish)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    POOLED = "pooled"  # its vector is here
    CHECKED = "checked"  # the answer that it checks goes on, or differs in its last token; see shared.messages.Submit


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
    echo: tuple[str, ...] = ()  # each prompt's text, which precedes its choices; "" for a prompt of ids
    timings: bool = False  # the response includes timings
    include_usage: bool = False  # a stream has the usage in a last chunk
    continuous_usage: bool = False  # a stream has the usage in every chunk
    return_ids: bool = False  # the response has token ids
    tokens_as_ids: bool = False  # log-probabilities name tokens by id
    prompt_logprobs: int | None = None  # the response has those of the prompt, and of this many of the likeliest tokens
    includes_stop: bool = False  # a choice ends with the stop string that ended it
    shows_specials: bool = False  # text shows special tokens
    hides_reasoning: bool = False
    model: str = ""
    cache_salt: str = ""  # this and the next two: see shared.messages.Submit
    deadline_ms: int = 0
    priority: int = 0
    tenant: str = ""  # the name of the request's API key
    fingerprint: str = ""  # only workers with this fingerprint may compute it; "": any, but all sequences by the same
    pooling: Pooling | None = None  # asks for one vector of each prompt instead of text
    receipt: bool = False  # the response has receipts
    answer: list[int] | None = None  # ids to check instead of generating; there is one prompt, and n is 1
    parser_config: ParserConfig | None = None  # None: all of the output is text
    continued: tuple[int, ...] = ()  # the output so far, which every choice goes on from and does not repeat
    scored_from: tuple[int, ...] = ()  # asks for each prompt's log-probabilities from this index on instead of text
    one_group: bool = False  # the prompts begin with the same tokens, which are computed once
    format_data: dict[str, Any] = field(default_factory=dict)  # what only this API format's response needs

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the worker is given. A prompt counts once, however many choices continue it."""
        return sum(map(len, self.prompts)) + len(self.continued)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    continued_tokens: int = 0  # of the prompt's; those that the output went on from
    reasoning_tokens: int | None = None  # of the completion's; None where nobody counts them

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
    usage: Usage | None = None  # of this choice so far
    logprobs: list[TokenLogprob] | None = None
    timings: Timings | None = None  # set together with `finish`
    seed: int | None = None
    vector: bytes = b""  # packed float32; set together with `finish` if the request asks for vectors
    prompt_logprobs: list[TokenLogprob] | None = None  # set together with `finish`; NaN for the first token
    before: Sequence[str] = ()  # in the first one, if the output goes on from another: the texts of that one's tokens
    scores: Sequence[Logprobs] = ()  # those of the prompt as they came; set together with `finish` if asked for
    output: list[int] | None = None  # all ids of the output; set with `finish` if a receipt is asked for

    @property
    def text(self) -> str:
        return "".join(self.texts)
