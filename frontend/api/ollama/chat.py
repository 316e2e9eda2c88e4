"""Ollama's /api/chat. A stream's lines hold parts of a message; the last line has `done` and the statistics."""

from typing import Annotated, Any

from msgspec import UNSET, Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.ollama import output, types
from frontend.api.ollama import output as envelope
from frontend.api.ollama.output import AnswerPart, LineWriter, check_model, error, status, stream_error
from frontend.api.ollama.types import AnswerFields, Message, messages_prompt
from frontend.api.request_builder import prepare
from frontend.chat.prompt import MAX_MESSAGES
from frontend.chat.tool_fields import FunctionTools, openai_choice, tool_choice
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.request_fields import doc
from frontend.server.sse import JSON_LINES

__all__ = [
    "FRAMING", "NAME", "PREFIX", "REQUEST", "complete", "error", "parse", "status", "stream_error", "stream_writer",
]  # fmt: skip

NAME, PREFIX = "ollama chat", "chat"
FRAMING = JSON_LINES


class OllamaChatRequest(AnswerFields):
    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None,
        doc("The conversation, oldest first; empty: answer at once that the model is loaded"),
    ] = None
    tools: FunctionTools = None


REQUEST = OllamaChatRequest


async def parse(request: OllamaChatRequest, context: ModelContext) -> GenerationRequest | bytes:
    """Makes a GenerationRequest. A request without messages only loads the model, so its response is returned instead.

    Raises NotFound, BadRequest or Unprocessable.
    """
    check_model(request.model, context)
    if not request.messages:
        return envelope.loaded(request, lambda fields: _answer(AnswerPart(), [], fields))
    tools = tool_choice(request.tools, openai_choice(None), True, context)
    prompt = await messages_prompt(request.messages, tools.functions, request.template_arguments(context), context)
    return await prepare(request.reading("messages", tools), [prompt.ids], context, prompt.begins, prompt.images)


def stream_writer(context: ResponseContext) -> LineWriter:
    return LineWriter(context, _answer)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    return await output.complete(context, arriving, _answer)


def _answer(said: AnswerPart, ids: list[int], fields: dict[str, Any]) -> types.OllamaChat:
    message = types.OllamaMessage(
        content=said.text, thinking=said.thinking or UNSET, tool_calls=list(said.calls) or UNSET
    )
    return types.OllamaChat(message=message, **fields)
