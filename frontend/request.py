"""The frontend's vocabulary: what every dialect's request becomes, and what its answer is made of.

A file of `api/` parses bytes into a `GenerationRequest`; the service turns that into a stream of `Delta`; the same file
of `api/` writes the Deltas in its format. No other module knows both HTTP and tokens.
"""

import enum
from dataclasses import dataclass, field

import msgspec

from frontend.output_parser.formats import ParserConfig
from shared.messages import Sampling, Timings


class Finish(enum.StrEnum):
    """Why a choice ended well (failures are exceptions, never a Finish)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request, whatever its dialect, tokenized and validated.

    Choice `i` of the answer belongs to prompt `i // n`.
    """

    prompts: tuple[list[int], ...]  # token ids, none empty
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    echo: tuple[str, ...] = ()  # what stands before each prompt's answers: the prompt; "" where it was given as ids
    timings: bool = False  # the answer has them
    include_usage: bool = False  # in a last chunk
    continuous_usage: bool = False  # in every chunk
    model: str = ""
    cache_salt: str = ""  # as the next two: see shared.messages.Submit
    deadline_ms: int = 0
    priority: int = 0
    tenant: str = ""  # the name of the API key of the HTTP request
    parser_config: ParserConfig | None = None  # what to look for in the answer's text; None: it is the answer
    format_data: dict[str, object] = field(default_factory=dict)  # what only this API format's response needs


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and its likeliest rivals, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, gc=False):
    """What one choice gained since the last Delta. Ids and texts are released from the same boundary.

    `texts[i]` is what token `ids[i]` added to the text: empty while a character is incomplete, cut where a
    stop string began. The last Delta of a choice has `finish`; `stop` is the string or id that ended it.
    """

    index: int
    ids: list[int]
    texts: list[str]
    finish: Finish | None = None
    stop: str | int | None = None
    usage: Usage | None = None  # of this choice so far
    logprobs: list[TokenLogprob] | None = None
    timings: Timings | None = None  # with finish
    seed: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)
