"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages

A stream is message_start, content_block_start, ping, content_block_delta…, content_block_stop, message_delta,
message_stop. `timings`, the seed that reproduces an answer, and the sampling fields that Anthropic lacks (`seed`,
`stop_token_ids`, …) are extensions.
"""

from frontend.api.anthropic import envelope
from frontend.api.anthropic import response_types as types
from frontend.api.anthropic.envelope import PREFIX, error, stream_error
from frontend.api.anthropic.messages_input import MessageCountRequest, MessageRequest, marks_cache, message_prompt
from frontend.api.anthropic.messages_output import ParsedWriter, parsed_blocks
from frontend.api.chat import structured_output_fields
from frontend.api.chat.tool_fields import anthropic_choice, checked, tool_choice
from frontend.api.model_context import ModelContext, check_model
from frontend.api.prepare import Reading, check_forms, prepare
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.api.totals import Totals
from frontend.errors import SluiceError, api_status
from frontend.output_parser.parsed import ParsedOutput
from frontend.output_parser.tool_choice import ToolChoice
from frontend.request import Delta, GenerationRequest
from frontend.server.sse import SERVER_SENT_EVENTS

__all__ = [
    "FRAMING",
    "NAME",
    "PREFIX",
    "REQUEST",
    "complete",
    "count_tokens",
    "error",
    "parse",
    "status",
    "stream_error",
    "stream_writer",
]

NAME = "messages"
FRAMING = SERVER_SENT_EVENTS
REQUEST = MessageRequest
status = api_status


async def parse(request: MessageRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    thinking = request.thinking
    reading = Reading(
        request, "messages", request.max_tokens, tool_choice=_tool_choice(request, context),
        form=structured_output_fields.anthropic(request.output_config),
        budget=(thinking.budget_tokens if thinking else None, "thinking.budget_tokens"),
        format_data=envelope.Asked(
            omits_thoughts=thinking is not None and thinking.display == "omitted", caches=marks_cache(request)
        ),
    )  # fmt: skip
    prompt = await message_prompt(request, reading.functions, context)
    return await prepare(reading, [prompt.ids], context, prompt.begins, prompt.pictures)


async def count_tokens(request: MessageCountRequest, context: ModelContext) -> types.InputTokenCount:
    """Returns the number of input tokens that a message with this body would have."""
    check_model(request.model, context)
    known = await checked(_tool_choice(request, context).shown_functions)
    await check_forms(structured_output_fields.anthropic(request.output_config))
    return types.InputTokenCount(input_tokens=len((await message_prompt(request, known, context.unlimited)).ids))


def _tool_choice(request: MessageRequest | MessageCountRequest, context: ModelContext) -> ToolChoice:
    parallel = request.tool_choice is None or not request.tool_choice.disable_parallel_tool_use
    return tool_choice(request.tools, anthropic_choice(request.tool_choice), parallel, context)


def stream_writer(context: ResponseContext) -> "TextWriter | ParsedWriter":
    parser_config = context.request.parser_config
    return TextWriter(context) if parser_config is None else ParsedWriter(context, parser_config)


class TextWriter:
    """Writes a response of plain text in one block."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._opening = envelope.start(context) + envelope.BLOCK_START + envelope.PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.shown.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            data += envelope.text_delta(delta, running_totals)
            if delta.finish is not None:
                data += envelope.BLOCK_STOP + envelope.end(self._context, delta, self._totals)
        return data

    def end(self) -> bytes:
        return b""


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    totals = Totals(context.request)
    texts: list[str] = []
    last: Delta | None = None
    async for deltas in arriving:
        for last in deltas:
            totals.add(last)
            texts += last.texts
    if last is None or last.finish is None:
        raise SluiceError("the message has no end")
    text = "".join(texts)
    if context.request.parser_config is None:
        return envelope.complete_message(context, [types.TextBlock(text=text)], last, totals)
    parsed = ParsedOutput.parse([text], context.request.parser_config)
    return envelope.complete_message(context, parsed_blocks(parsed, context), last, totals, parsed.parser.called)
