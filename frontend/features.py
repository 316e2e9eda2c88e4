"""What only some requests ask for, one field for each feature. A request that only generates text has none of it.

These are plain values. What they do to an answer stands in a module of `frontend/generation/` for each of them, and
`frontend/generation/extras.py` is the only place that knows which one belongs to which field.
"""

from dataclasses import dataclass

from shared.messages import Adapter, Picture, Pooling


@dataclass(frozen=True, slots=True)
class Scored:
    """Asks for the log-probabilities of each prompt instead of text."""

    starts: tuple[int, ...]  # for each prompt the index that it is scored from
    one_group: bool = False  # the prompts begin with the same tokens, which are computed once


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What llama.cpp's clients have a stream tell while it runs."""

    timings: bool  # every event has them
    progress: bool  # the stream begins with the progress of the prompt


@dataclass(frozen=True, slots=True)
class Features:
    """What a request asks for besides text that follows its prompts."""

    continued: tuple[int, ...] = ()  # the output so far, which every choice goes on from and does not repeat
    echo: tuple[str, ...] = ()  # each prompt's text, which precedes its choices; "" for a prompt of ids
    prompt_logprobs: int | None = None  # the response has those of the prompt, and of this many of the likeliest tokens
    output_ms: int = 0  # a choice ends so long after its first token, once it has a line break; 0: it goes on
    receipt: bool = False  # the response has receipts
    checked: list[int] | None = None  # ids to check instead of generating; there is one prompt, and n is 1
    scored: Scored | None = None
    adapter: Adapter | None = None  # changes the weights of the model
    pictures: tuple[Picture, ...] = ()  # of the prompt, of which there is one
    predicted: tuple[int, ...] | None = None  # ids that the client expects as the output
    pooling: Pooling | None = None  # asks for one vector of each prompt instead of text


NO_FEATURES = Features()
