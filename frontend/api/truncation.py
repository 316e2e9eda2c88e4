"""Prompts that a request allows to be shortened (`truncate_prompt_tokens`)."""

from frontend.api.model_context import ModelContext
from frontend.errors import Unprocessable


def before_truncation(kept: int | None, context: ModelContext) -> ModelContext:
    """Returns the context in which a prompt is read that `truncated` shortens: any length is right."""
    return context if kept is None else context.unlimited


def truncated(ids: list[int], most: int | None, kept: int | None, context: ModelContext) -> list[int]:
    """Returns the last `kept` ids of a prompt; all if it is None, and as many as leave room for the answer if it is -1.

    most: the limit on new tokens, if there is one
    """
    if kept is None:
        return ids
    if kept == 0 or kept > context.max_seq_len:
        raise Unprocessable(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {context.max_seq_len}, got {kept}",
            param="truncate_prompt_tokens", code="out_of_range",
        )  # fmt: skip
    if kept < 0 and (kept := context.max_seq_len - (most or 1)) <= 0:
        return ids  # check_length says that the answer alone is too long
    return ids[-kept:]
