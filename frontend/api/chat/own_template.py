"""What a request gives the chat template besides messages: a template of its own, and documents."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from frontend.api.model_context import ModelContext
from frontend.errors import Unprocessable
from frontend.output_parser.formats import ModelFormat
from frontend.text.chat_template import ChatTemplate


def with_template(context: ModelContext, source: str | None) -> ModelContext:
    """Returns the context of a request that brings the chat template `source`. The model's output keeps its format.

    Raises Unprocessable if the server does not trust templates of requests.
    """
    if source is None:
        return context
    if not context.trusts_templates:
        raise Unprocessable(
            "`chat_template`: the server renders templates of requests only with --trust-request-chat-template",
            param="chat_template", code="unsupported_field",
        )  # fmt: skip
    shown = ModelFormat.of({"default": source})
    style = replace(
        context.style, shows_tools=shown.shows_tools, thinking_switch=shown.thinking_switch,
        has_reasoning_effort=shown.has_reasoning_effort,
    )  # fmt: skip
    sees = context.tokenizer.pictures is not None
    template = _compiled(source, tuple(context.tokenizer.named_tokens.items()), sees)
    return replace(context, template=template, style=style)


@lru_cache(maxsize=8)
def _compiled(source: str, specials: tuple[tuple[str, str], ...], sees: bool) -> ChatTemplate:
    return ChatTemplate({"default": source}, dict(specials), sees=sees)


def document_arguments(documents: list[dict[str, Any]] | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variable for documents. Raises Unprocessable if the template does not show any."""
    if not documents:
        return {}
    if not context.template.mentions("documents"):
        raise Unprocessable(
            "`documents`: this model's chat template has no place for them", param="documents", code="unsupported_field"
        )
    return {"documents": documents}
