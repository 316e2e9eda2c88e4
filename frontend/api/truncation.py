"""Prompts that a request allows to be shortened (`truncate_prompt_tokens`, `truncation_side`)."""

from frontend.api.model_context import ModelContext
from frontend.api.requests.request_types import GenerationFields
from frontend.errors import Unprocessable


def before_truncation(kept: int | None, context: ModelContext) -> ModelContext:
    """Returns the context for reading a prompt that `truncated` will shorten: without a limit on its length."""
    return context if kept is None else context.unlimited


def truncated(ids: list[int], most: int | None, fields: GenerationFields, context: ModelContext) -> list[int]:
    """Returns the last ids of a prompt, as many as `truncate_prompt_tokens` says; all of them if it is absent.

    With -1, it leaves room for the answer; with `truncation_side` "right", the first ids are kept.

    most: the limit on new tokens, if there is one
    """
    kept = getattr(fields, "truncate_prompt_tokens", None)
    if kept is None:
        return ids
    if kept == 0 or kept > context.max_seq_len:
        raise Unprocessable(
            f"`truncate_prompt_tokens` must be -1 or from 1 to {context.max_seq_len}, got {kept}",
            param="truncate_prompt_tokens", code="out_of_range",
        )  # fmt: skip
    if kept < 0 and (kept := context.max_seq_len - (most or 1)) <= 0:
        return ids  # check_length says that the answer alone is too long
    return ids[:kept] if getattr(fields, "truncation_side", None) == "right" else ids[-kept:]
