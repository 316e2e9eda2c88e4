"""The features that only some requests ask for, one field for each. A request that only generates text has none.

These are plain values. Each feature has a module in `frontend/generation/`, which changes the answer. Only
`frontend/generation/extras.py` knows which module belongs to which field.
"""

from dataclasses import dataclass

from shared.messages import Adapter, Picture, Pooling


@dataclass(frozen=True, slots=True)
class Scored:
    """Asks for the log-probabilities of each prompt instead of text."""

    starts: tuple[int, ...]  # for each prompt the index of the first token that is scored
    one_group: bool = False  # the prompts begin with the same tokens, which are computed once


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The reports of llama.cpp that a stream has while it runs."""

    timings: bool  # every event has them
    progress: bool  # the stream begins with the progress of the prompt


@dataclass(frozen=True, slots=True)
class Features:
    """Optional features of a request, beyond plain generation."""

    continued: tuple[int, ...] = ()  # the output so far; every choice continues it, and does not repeat it
    echo: tuple[str, ...] = ()  # each prompt's text, which precedes its choices; "" for a prompt of ids
    prompt_logprobs: int | None = None  # also of this many of the likeliest tokens in each place; None: none
    output_ms: int = 0  # time limit from the first token on, for a choice with a line break; 0: none
    receipt: bool = False  # the response has receipts
    checked: list[int] | None = None  # ids to check instead of generating; there is one prompt, and n is 1
    scored: Scored | None = None
    adapter: Adapter | None = None  # changes the weights of the model
    pictures: tuple[Picture, ...] = ()  # of the only prompt
    predicted: tuple[int, ...] | None = None  # ids that the client expects as the output
    pooling: Pooling | None = None  # asks for one vector of each prompt instead of text


NO_FEATURES = Features()
