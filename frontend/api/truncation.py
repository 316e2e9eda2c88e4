"""Shortens a prompt if the request allows it (`truncate_prompt_tokens`, `truncation_side`)."""

from frontend.api.model_context import ModelContext
from frontend.api.requests.request_types import GenerationFields
from frontend.errors import Unprocessable


def before_truncation(kept: int | None, context: ModelContext) -> ModelContext:
    """Returns the context for reading a prompt: without a length limit if the prompt will be shortened to `kept`."""
    return context if kept is None else context.unlimited


def truncated(ids: list[int], most: int | None, fields: GenerationFields, context: ModelContext) -> list[int]:
    """Returns the last `truncate_prompt_tokens` ids of a prompt; all of them if the field is absent.

    -1 keeps as many ids as leave room for the answer. `truncation_side` "right" keeps the first ids.

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
        return ids  # check_length then refuses the request, because the answer alone is too long
    return ids[:kept] if getattr(fields, "truncation_side", None) == "right" else ids[-kept:]
