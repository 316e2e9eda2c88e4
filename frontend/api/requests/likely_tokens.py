"""Limits how many of the likeliest tokens a request may have reported: for each position, and for all together.

The limit of a position is `--max-logprobs`. In a request, -1 stands for the whole vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from frontend.api.requests.request_types import GenerationFields
from frontend.errors import Unprocessable

FEW_TOPS = 20  # the most per position in OpenAI's API
# Log-probabilities of an answer in all. A worker needs 8 bytes for each, a frontend that writes one answer 40 to 90.
MOST = 1 << 20  # of prompts, and of answers with more than FEW_TOPS per position
MOST_OF_FEW = 1 << 22  # of answers with up to FEW_TOPS per position, unless they are streamed
MOST_REPEATED = 1 << 16  # in one event of a stream: an echoed prompt, or SGLang's answer so far


class Tops(NamedTuple):
    """How many of the likeliest tokens are reported for each position; None: not even the token itself is scored."""

    output: int | None
    prompt: int | None


NO_TOPS = Tops(None, None)


class TokenLimits(NamedTuple):
    vocab_size: int
    max_logprobs: int  # the setting; -1: no limit


class Places(NamedTuple):
    """The number of positions in all sequences of a request whose tokens are scored."""

    output: int
    prompt: int
    echoed: bool = False  # whether the prompt's positions report as many tokens as the output's, because of `echo`

    @classmethod
    def of(cls, prompts: Sequence[list[int]], n: int, most: int, echoed: bool) -> Self:
        """Counts the positions if each prompt gets `n` answers, which have up to `most` tokens."""
        return cls(len(prompts) * n * most, n * sum(map(len, prompts)), echoed)


def within_limits(asked: Tops, fields: GenerationFields, places: Places, limits: TokenLimits) -> Tops:
    """Returns the numbers that a request asks for, with the vocabulary's size in place of -1.

    Raises Unprocessable for a number above `--max-logprobs`, for a total above MOST, and for log-probabilities of a
    prompt in a stream.
    """
    if asked.prompt is not None and fields.stream:
        raise Unprocessable(
            "`prompt_logprobs` are not available in a stream", param="prompt_logprobs", code="conflicting_fields"
        )
    name = "top_logprobs" if getattr(fields, "top_logprobs", None) else "logprobs"
    output = None if asked.output is None else allowed(asked.output, name, limits)
    prompt = None if asked.prompt is None else allowed(asked.prompt, "prompt_logprobs", limits)
    if output is not None:
        echoed = places.prompt if places.echoed and output > FEW_TOPS else 0
        check_total(output, places.output + echoed, name, fields.stream)
    if output is not None and places.echoed:
        _check(output, places.prompt, name, MOST_REPEATED if fields.stream else MOST)
    if prompt is not None:
        _check(prompt, places.prompt, "prompt_logprobs", MOST)
    return Tops(output, prompt)


def allowed(asked: int, name: str, limits: TokenLimits) -> int:
    """Returns `asked`, but at most the vocabulary's size. -1 stands for the vocabulary's size.

    Raises Unprocessable if the number is above `--max-logprobs`.
    """
    wanted = limits.vocab_size if asked < 0 else asked
    if wanted > limits.max_logprobs >= 0:
        whole = f" (the whole vocabulary, {wanted} tokens)" if asked < 0 else ""
        raise Unprocessable(
            f"`{name}` must be at most {limits.max_logprobs}, the server's `--max-logprobs`, got {asked}{whole}",
            param=name, code="out_of_range",
        )  # fmt: skip
    return min(wanted, limits.vocab_size)


def check_total(top: int, places: int, name: str, streams: bool) -> None:
    """Raises Unprocessable if `top` likeliest tokens for each of `places` positions of answers are too many to
    report."""
    if top > FEW_TOPS:
        _check(top, places, name, MOST)
    elif not streams:
        _check(top, places, name, MOST_OF_FEW)


def check_repeated(top: int, places: int, name: str) -> None:
    """Raises Unprocessable for a stream whose events would repeat too many log-probabilities."""
    _check(top, places, name, MOST_REPEATED)


def _check(top: int, places: int, name: str, most: int) -> None:
    entries = places * max(1, top)
    if entries > most:
        raise Unprocessable(
            f"`{name}` of {top} in {places} places makes {entries} log-probabilities; a request has at most {most} "
            f"in all: lower `{name}` or the most tokens of the answer, or send fewer or shorter prompts",
            param=name, code="out_of_range",
        )  # fmt: skip
