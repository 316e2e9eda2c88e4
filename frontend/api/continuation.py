"""`continue_from`: an answer goes on from a place in another one, which is given by its token ids.

The request is otherwise that of the other answer. Whatever counts tokens of the answer (`max_tokens`, `min_tokens`,
penalties, a budget for reasoning, the random numbers) counts those that it goes on from, so the same sampling gives
the same answer from every place on.
"""

from typing import Annotated, Any

from msgspec import Meta

from frontend.api.common import ModelContext, check_ids
from frontend.api.request_model import RequestModel
from frontend.api.request_types import Count, TokenDetailFields, doc
from frontend.errors import Unprocessable

FIELD = "continue_from"
MAX_IDS = 1 << 24


class ContinueFrom(RequestModel):
    ids: Annotated[list[Count], Meta(max_length=MAX_IDS), doc("The tokens of an answer")]
    position: Annotated[Count | None, doc("Only so many of them, the first; absent: all")] = None


ContinueFromField = Annotated[ContinueFrom | None, doc("Go on from a place in an answer to the same prompt")]


def continued_ids(
    request: TokenDetailFields, prompts: list[list[int]], max_tokens: int, context: ModelContext
) -> tuple[int, ...]:
    """Returns the ids that the answer goes on from. Raises Unprocessable if that is not possible.

    prompts: those of the request, as ids
    max_tokens: the most tokens of the whole answer
    """
    given = getattr(request, FIELD)
    if given is None:
        return ()
    _check_together(request, len(prompts))
    ids: list[int] = given.ids
    check_ids(f"{FIELD}.ids", ids, context.vocab_size)
    position = len(ids) if given.position is None else given.position
    if position > len(ids):
        raise _refusal("position", f"is {position}, but the answer has {len(ids)} tokens")
    if position > max_tokens:
        raise _refusal(
            "position" if given.position is not None else "ids",
            f"leaves nothing to generate: {position} tokens are there, and `max_tokens`, which counts them, too, is "
            f"{max_tokens}",
        )
    return tuple(ids[:position])


def _check_together(request: TokenDetailFields, prompts: int) -> None:
    if prompts > 1:
        raise Unprocessable(f"`{FIELD}` needs a single prompt", param=FIELD, code="conflicting_fields")
    asked: dict[str, Any] = {"echo": False, "prompt_logprobs": None}
    for name, absent in asked.items():
        if getattr(request, name, absent) != absent:
            raise Unprocessable(f"`{FIELD}` cannot go with `{name}`", param=name, code="conflicting_fields")


def _refusal(field: str, problem: str) -> Unprocessable:
    param = f"{FIELD}.{field}"
    return Unprocessable(f"`{param}` {problem}", param=param, code="out_of_range")
