"""Reasoning and tool calls in Anthropic's format: https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview

messages.py writes responses without reasoning and tool calls. The signature of a thinking block is a
digest of its text. The server does not check the signature when a client sends the block back.
"""

from base64 import b64encode
from hashlib import sha256
from typing import Any

import msgspec

from frontend.api.anthropic import envelope
from frontend.api.anthropic import response_types as types
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import ResponseContext
from frontend.api.totals import Totals
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig
from frontend.output_parser.parsed import Call, ParsedOutput
from frontend.output_parser.parser import output_parser
from frontend.request import Delta


def call_id(context: ResponseContext, index: int) -> str:
    return f"toolu_{context.nonce}{index:02x}"


def _signature(digest: Any) -> str:
    return b64encode(digest.digest()).decode()


def parsed_blocks(parsed: ParsedOutput, context: ResponseContext) -> list[types.ContentBlock]:
    """Returns the blocks of a complete message, in the answer's order; an empty text block if there are none."""
    omitted = envelope.asked(context.request).omits_thoughts
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
        self._opening = envelope.start(context) + envelope.PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.shown.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            events = self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])
            after = envelope.running_usage(running_totals) + b"}\n\n"
            data += b"".join([self._blocks.write(event, after) for event in events])
            if delta.finish is not None:
                data += self._blocks.close() + envelope.end(self._context, delta, self._totals, self._parser.called)
        return data

    def end(self) -> bytes:
        return b""


class Blocks:
    """Encodes the events that open, fill and close the content blocks, one block after the other."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._omitted = envelope.asked(context.request).omits_thoughts
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
        return before + envelope.event(types.ContentBlockStart(index=self._index, content_block=block))

    def _end(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signature = b""
        if kind is types.ThinkingBlock:
            signature = self._delta(types.SignatureDelta(signature=_signature(self._digest)), b"}\n\n")
            self._digest = sha256()
        return signature + envelope.event(types.ContentBlockStop(index=self._index))

    def _delta(self, delta: types.BlockDelta, after: bytes) -> bytes:
        data = to_json(types.ContentBlockDelta(index=self._index, delta=delta))
        return b"event: content_block_delta\ndata: " + data[:-1] + after
