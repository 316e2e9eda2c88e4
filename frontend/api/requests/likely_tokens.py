"""Limits how many of the likeliest tokens a request may have reported: for each position, and for all together.

The limit of a position is `--max-logprobs`. In a request, -1 stands for the whole vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from frontend.api.requests.request_types import GenerationFields
from frontend.errors import Unprocessable

ANY_PLACES = 20  # the most per position in OpenAI's API: up to this number, the total is not limited
MOST = 1 << 20  # total for all positions: 8 MiB in a worker, and about 0.3 GB in a frontend that writes one answer


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
    check_total(output or 0, places.output + (places.prompt if places.echoed else 0), name)
    check_total(prompt or 0, places.prompt, "prompt_logprobs")
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


def check_total(top: int, places: int, name: str) -> None:
    """Raises Unprocessable if `top` likeliest tokens for each of `places` positions are too many to report."""
    if top > ANY_PLACES and top * places > MOST:
        raise Unprocessable(
            f"`{name}` of {top} in {places} places makes {top * places} log-probabilities; an answer with more than "
            f"{ANY_PLACES} in each place has at most {MOST} in all: lower `{name}` or the most tokens of the answer",
            param=name, code="out_of_range",
        )  # fmt: skip
