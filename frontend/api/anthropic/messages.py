"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages

A stream is message_start, content_block_start, ping, content_block_delta…, content_block_stop, message_delta,
message_stop. `timings`, the seed that reproduces an answer, and the sampling fields that Anthropic lacks (`seed`,
`stop_token_ids`, …) are extensions.
"""

from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from frontend.api.answer import Answer, AsyncDeltas, ResponseContext, Totals
from frontend.api.anthropic import response_types as types
from frontend.api.anthropic.messages_request import MessageCountRequest, MessageRequest, cached_for, message_prompt
from frontend.api.receipts import receipt_of
from frontend.api.request_builder import ParsedRequest, check_forms, prepare
from frontend.chat.tool_fields import anthropic_choice, checked, tool_choice
from frontend.errors import ContextLengthExceeded, SluiceError, TooLarge, api_status
from frontend.model_context import ModelContext, check_model
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import ParserConfig, ToolChoice
from frontend.output_parser.parser import Call, ParsedOutput, output_parser
from frontend.request import Delta, Finish, GenerationRequest
from frontend.schema.base import to_json
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.structured_output import fields

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
    thinking, keep_s = request.thinking, cached_for(request)
    reading = ParsedRequest(
        request, "messages", request.max_tokens, tool_choice=_tool_choice(request, context),
        form=fields.anthropic(request.output_config, request.output_format),
        budget=(thinking.budget_tokens if thinking else None, "thinking.budget_tokens"),
        format_data=Asked(
            omits_thoughts=thinking is not None and thinking.display == "omitted", caches=keep_s > 0
        ),
    )  # fmt: skip
    prompt = await message_prompt(request, reading.functions, context)
    prepared = await prepare(reading, [prompt.ids], context, prompt.begins, prompt.images)
    return prepared.admitted(keep_s=keep_s) if keep_s else prepared


async def count_tokens(request: MessageCountRequest, context: ModelContext) -> types.InputTokenCount:
    """Returns the number of input tokens that a message with this body would have."""
    check_model(request.model, context)
    known = await checked(_tool_choice(request, context).shown_functions)
    await check_forms(fields.anthropic(request.output_config, request.output_format))
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
        self._opening = start(context) + BLOCK_START + PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.shown.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            data += text_delta(delta, running_totals)
            if delta.finish is not None:
                data += BLOCK_STOP + end(self._context, delta, self._totals)
        return data

    def end(self) -> bytes:
        return b""


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    """Returns the response of a request that does not stream."""
    totals, answer = Totals(context.request), Answer(context)
    async for deltas in arriving:
        for delta in deltas:
            totals.add(delta)
            answer.add(delta)
    if context.request.parser_config is None:
        return complete_message(context, [types.TextBlock(text=answer.text)], answer.end, totals)
    parsed = ParsedOutput.parse([answer.text], context.request.parser_config)
    return complete_message(context, parsed_blocks(parsed, context), answer.end, totals, parsed.parser.called)


# Reasoning and tool calls in Anthropic's format:
# https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview
#
# The functions further down write responses without reasoning and tool calls. The signature of a thinking block is a
# digest of its text. The server does not check the signature when a client sends the block back.


def call_id(context: ResponseContext, index: int) -> str:
    return f"toolu_{context.nonce}{index:02x}"


def _signature(digest: Any) -> str:
    return b64encode(digest.digest()).decode()


def parsed_blocks(parsed: ParsedOutput, context: ResponseContext) -> list[types.ContentBlock]:
    """Returns the blocks of a complete message, in the answer's order; an empty text block if there are none."""
    omitted = asked(context.request).omits_thoughts
    blocks: list[types.ContentBlock] = []
    calls = 0
    for part in parsed.parts:
        match part:
            case Text(text):
                blocks.append(types.TextBlock(text=text))
            case ReasoningText(text):
                shown = "" if omitted else text
                blocks.append(types.ThinkingBlock(thinking=shown, signature=_signature(sha256(text.encode()))))
            case Call():
                arguments = msgspec.Raw(part.closed_arguments.encode())
                blocks.append(types.ToolUseBlock(id=call_id(context, calls), name=part.name, input=arguments))
                calls += 1
    return blocks or [types.TextBlock(text="")]


class ParsedWriter:
    """Writes a stream with reasoning or tool calls, one content block after the other."""

    def __init__(self, context: ResponseContext, parser_config: ParserConfig) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._parser = output_parser(parser_config)
        self._blocks = Blocks(context)
        self._opening = start(context) + PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.shown.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            events = self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])
            after = running_usage(running_totals) + b"}\n\n"
            data += b"".join([self._blocks.write(event, after) for event in events])
            if delta.finish is not None:
                data += self._blocks.close() + end(self._context, delta, self._totals, self._parser.called)
        return data

    def end(self) -> bytes:
        return b""


class Blocks:
    """Encodes the events that open, fill and close the content blocks, one block after the other."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._omitted = asked(context.request).omits_thoughts
        self._index = -1
        self._open: type[types.ContentBlock] | None = None
        self._digest = sha256()

    def write(self, event: Event, after: bytes) -> bytes:
        """Encodes an output event. after: the bytes at the end of each delta event"""
        match event:
            case Text(text):
                opening = self._begin(types.TextBlock(text="")) if self._open is not types.TextBlock else b""
                return opening + self._delta(types.TextDelta(text=text), after)
            case ReasoningText(text):
                block = types.ThinkingBlock(thinking="", signature="")
                opening = self._begin(block) if self._open is not types.ThinkingBlock else b""
                self._digest.update(text.encode())
                return opening if self._omitted else opening + self._delta(types.ThinkingDelta(thinking=text), after)
            case CallStart(index, name):
                id = call_id(self._context, index)
                return self._begin(types.ToolUseBlock(id=id, name=name, input=msgspec.Raw(b"{}")))
            case CallArguments(_, fragment):
                return self._delta(types.InputJsonDelta(partial_json=fragment), after)
            case CallEnd():
                return self._end()

    def close(self) -> bytes:
        """Ends the last block. If there is no block, it writes an empty block, because every answer has a block."""
        return (self._begin(types.TextBlock(text="")) if self._index < 0 else b"") + self._end()

    def _begin(self, block: types.ContentBlock) -> bytes:
        before = self._end()
        self._index += 1
        self._open = type(block)
        return before + event(types.ContentBlockStart(index=self._index, content_block=block))

    def _end(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signature = b""
        if kind is types.ThinkingBlock:
            signature = self._delta(types.SignatureDelta(signature=_signature(self._digest)), b"}\n\n")
            self._digest = sha256()
        return signature + event(types.ContentBlockStop(index=self._index))

    def _delta(self, delta: types.BlockDelta, after: bytes) -> bytes:
        data = to_json(types.ContentBlockDelta(index=self._index, delta=delta))
        return b"event: content_block_delta\ndata: " + data[:-1] + after


# The parts of an Anthropic response around its content: first and last events, usage and errors.

PREFIX = "msg"
FINISH: dict[Finish, types.StopReason] = {
    Finish.EOS: "end_turn",
    Finish.STOP: "stop_sequence",
    Finish.LENGTH: "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a request that affect how its response is written."""

    omits_thoughts: bool = False  # whether thinking blocks are written without their text
    caches: bool = False  # whether the request has a `cache_control`


NOTHING = Asked()


def asked(request: GenerationRequest) -> Asked:
    return request.format_data or NOTHING


def error(exc: SluiceError, request_id: str) -> bytes:
    message = _too_long(exc) if isinstance(exc, ContextLengthExceeded) else exc.message
    body = types.AnthropicErrorBody(type=_kind(exc), message=message)
    if exc.param == "thread":  # this error makes the SDK's helpers continue without a thread
        body.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return to_json(types.AnthropicError(error=body, request_id=request_id))


def stream_error(exc: SluiceError, request_id: str, context: ResponseContext) -> bytes:
    """Encodes the event that ends a failed stream. No message_stop follows."""
    return b"event: error\ndata: " + error(exc, request_id) + b"\n\n"


def _too_long(exc: ContextLengthExceeded) -> str:
    """Returns Anthropic's error message, from which clients parse the numbers."""
    if exc.output:
        return (
            f"input length and `max_tokens` exceed context limit: {exc.prompt} + {exc.output} > {exc.limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    about = "at least " if exc.at_least else ""
    return f"prompt is too long: {about}{exc.prompt} tokens > {exc.limit} maximum"


def _kind(exc: SluiceError) -> str:
    if isinstance(exc, TooLarge):
        return "request_too_large"
    if exc.code == "model_not_found":
        return "not_found_error"
    return "api_error" if exc.kind == "internal_error" else exc.kind


def event(event: types.MessageEvent) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), to_json(event))


BLOCK_START = event(types.ContentBlockStart(index=0, content_block=types.TextBlock(text="")))
PING = event(types.Ping())
BLOCK_STOP = event(types.ContentBlockStop(index=0))
STOP = event(types.MessageStop())
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


def text_delta(delta: Delta, totals: Totals | None) -> bytes:
    """Encodes a delta of the first block. totals: source of the running usage; None: no running usage"""
    text = delta.text
    if not text and (totals is None or not delta.ids):
        return b""
    return b"%s%s}%s}\n\n" % (DELTA, to_json(text), running_usage(totals))


def running_usage(totals: Totals | None) -> bytes:
    """Encodes running usage as the last field of a delta event; empty if none is requested (None)."""
    return b"" if totals is None else b',"usage":' + to_json(usage(totals))


def start(context: ResponseContext) -> bytes:
    """Encodes the first event. Its usage lacks the number of cached tokens, which is known only at the end."""
    message = types.Message(
        id=_id(context), model=context.request.model, content=[], stop_reason=None, stop_sequence=None,
        usage=usage(Totals(context.request)),
    )  # fmt: skip
    return event(types.MessageStart(message=message))


def end(context: ResponseContext, delta: Delta, totals: Totals, called: bool = False) -> bytes:
    """Encodes the last events, after all blocks are closed. called: whether the answer has tool calls"""
    reason = types.MessageDelta(
        delta=stop(delta, called),
        usage=usage(totals),
        seed=delta.seed,
        timings=totals.timings,
        receipt=receipt_of(context, delta),
    )
    return event(reason) + STOP


def complete_message(
    context: ResponseContext, blocks: list[types.ContentBlock], delta: Delta, totals: Totals, called: bool = False
) -> bytes:
    """Encodes a whole message. delta: the message's last delta"""
    reason = stop(delta, called)
    return to_json(
        types.Message(
            id=_id(context),
            model=context.request.model,
            content=blocks,
            stop_reason=reason.stop_reason,
            stop_sequence=reason.stop_sequence,
            usage=usage(totals),
            seed=delta.seed,
            timings=totals.timings,
            receipt=receipt_of(context, delta),
        )
    )


def _id(context: ResponseContext) -> str:
    return f"{PREFIX}_{context.nonce}"


def stop(delta: Delta, called: bool = False) -> types.MessageEnd:
    """Returns why the message ended. Only a stop string counts as a stop sequence; a stop token id ends the turn like
    the model's own end token."""
    sequence = delta.stop if isinstance(delta.stop, str) else None
    finish = Finish.EOS if delta.finish is Finish.STOP and sequence is None else delta.finish
    if called and finish is Finish.EOS:
        return types.MessageEnd(stop_reason="tool_use", stop_sequence=None)
    return types.MessageEnd(stop_reason=FINISH[finish or Finish.LENGTH], stop_sequence=sequence)


def usage(totals: Totals) -> types.MessageUsage:
    """Returns the usage. Cached tokens are counted separately only for requests with a `cache_control`."""
    used = totals.usage
    cached = used.cached_tokens if asked(totals.request).caches else 0
    return types.MessageUsage(
        input_tokens=used.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=used.completion_tokens,
    )
