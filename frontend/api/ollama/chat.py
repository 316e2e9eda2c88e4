"""Ollama's /api/chat: lines with parts of a message, the last of which has `done` and the statistics."""

from typing import Annotated, Any

from msgspec import UNSET, Meta

from frontend.api.chat_prompt import MAX_MESSAGES
from frontend.api.common import (
    AsyncDeltas,
    ModelContext,
    ResponseContext,
    generation_request,
    sampling,
)
from frontend.api.context_length import check_length
from frontend.api.ollama import envelope, output
from frontend.api.ollama import response_types as types
from frontend.api.ollama.envelope import MODEL, check_model, error, status, stream_error
from frontend.api.ollama.messages import Message, messages_prompt
from frontend.api.ollama.options import AnswerFields
from frontend.api.ollama.output import LineWriter, Said
from frontend.api.request_types import doc
from frontend.api.tools import FunctionTools, checked_choice, functions, grammar_and_parser, openai_choice
from frontend.request import GenerationRequest
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
    """Makes a GenerationRequest, or the answer to a request without messages, which only loads the model.

    Raises NotFound, BadRequest or Unprocessable.
    """
    check_model(request.model, context)
    if not request.messages:
        return envelope.loaded(request, lambda fields: _answer(Said(), [], fields))
    known = functions(request.tools)
    tool_choice = checked_choice(known, openai_choice(None), True, context)
    ids, begins = await messages_prompt(request.messages, known, request.template_arguments(context), context)
    check_length("messages", len(ids), 1, context)
    grammar, parser_config = await grammar_and_parser(tool_choice, begins, await request.text_grammar(), context)
    fields = request.chosen.fields(stream=request.stream, receipt=request.receipt)
    chosen = sampling(fields, request.max_tokens(len(ids), context), context, grammar=grammar)
    return generation_request(
        fields, context, (ids,), chosen, stops=fields.stops, parser_config=parser_config,
        format_data={MODEL: request.model},
    )  # fmt: skip


def stream_writer(context: ResponseContext) -> LineWriter:
    return LineWriter(context, _answer)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Writes the answer in one piece."""
    return await output.complete(context, arriving, _answer)


def _answer(said: Said, ids: list[int], fields: dict[str, Any]) -> types.OllamaChat:
    message = types.OllamaMessage(
        content=said.text, thinking=said.thinking or UNSET, tool_calls=list(said.calls) or UNSET
    )
    return types.OllamaChat(message=message, **fields)
