"""The optional features of a request, one field for each. A request that only generates text has none.

These are plain values. Each feature has a module in `frontend/generation/` that changes the answer. Only
`frontend/generation/extras.py` knows which module belongs to which field.
"""

from dataclasses import dataclass

from shared.messages import Adapter, Picture, Pooling


@dataclass(frozen=True, slots=True)
class Scored:
    """Asks for the log-probabilities of each prompt instead of text."""

    starts: tuple[int, ...]  # for each prompt, the index of the first token that is scored
    one_group: bool = False  # whether the prompts begin with the same tokens, which are then computed once


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
    pictures: tuple[Picture, ...] = ()  # the pictures of the request's only prompt
    predicted: tuple[int, ...] | None = None  # ids that the client expects as the output
    pooling: Pooling | None = None  # asks for one vector of each prompt instead of text


NO_FEATURES = Features()
