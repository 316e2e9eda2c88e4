"""Reasoning and tool calls in Anthropic's format: https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview

`messages` writes responses without either. The signature of a thinking block is a digest of its text; it is not checked
when the block is sent back.
"""

from base64 import b64encode
from hashlib import sha256
from typing import Any

import msgspec

from frontend.api.anthropic import envelope as frame
from frontend.api.common import ResponseContext, Totals, to_json
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig
from frontend.output_parser.parsed import Call, ParsedOutput
from frontend.output_parser.parser import OutputParser
from frontend.request import Delta

OMITTED = "omitted"  # GenerationRequest.format_data["thinking"]: thinking blocks are sent without their text


def call_id(context: ResponseContext, index: int) -> str:
    return f"toolu_{context.nonce}{index:02x}"


def _signed(thought: bytes) -> str:
    return b64encode(sha256(thought).digest()).decode()


def parsed_blocks(output: ParsedOutput, context: ResponseContext) -> list[dict[str, Any]]:
    """The blocks of a complete response, in order; an empty text block if the output was empty."""
    omitted = context.request.format_data.get("thinking") == OMITTED
    blocks: list[dict[str, Any]] = []
    calls = 0
    for part in output.parts:
        match part:
            case Text(text):
                blocks.append({"type": "text", "text": text})
            case ReasoningText(text):
                thought = "" if omitted else text
                blocks.append({"type": "thinking", "thinking": thought, "signature": _signed(text.encode())})
            case Call():
                arguments = msgspec.Raw(part.closed_arguments.encode())
                blocks.append(
                    {"type": "tool_use", "id": call_id(context, calls), "name": part.name, "input": arguments}
                )
                calls += 1
    return blocks or [{"type": "text", "text": ""}]


class ParsedWriter:
    """Writes one response with reasoning or tool calls, one block after the other."""

    def __init__(self, context: ResponseContext, parser_config: ParserConfig) -> None:
        self._context = context
        self._totals = Totals(context.request)
        self._parser = OutputParser(parser_config)
        self._blocks = Blocks(context)
        self._opening = frame.start(context) + frame.PING

    def write(self, deltas: list[Delta]) -> bytes:
        data = b""
        if deltas and self._opening:
            data, self._opening = self._opening, b""
        running_totals = self._totals if self._context.request.continuous_usage else None
        for delta in deltas:
            self._totals.add(delta)
            events = self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])
            after = frame.running(running_totals) + b"}\n\n"
            data += b"".join([self._blocks.write(event, after) for event in events])
            if delta.finish is not None:
                data += self._blocks.close() + frame.end(self._context, delta, self._totals, self._parser.called)
        return data

    def end(self) -> bytes:
        return b""


class Blocks:
    """Opens, fills and closes one block after the other."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._omitted = context.request.format_data.get("thinking") == OMITTED
        self._index = -1
        self._open = ""  # the type of the block that is open
        self._digest = sha256()

    def write(self, event: Event, after: bytes) -> bytes:
        """after: the end of each delta"""
        match event:
            case Text(text):
                opening = self._opened({"type": "text", "text": ""}) if self._open != "text" else b""
                return opening + self._delta({"type": "text_delta", "text": text}, after)
            case ReasoningText(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                opening = self._opened(block) if self._open != "thinking" else b""
                self._digest.update(text.encode())
                thinking = {"type": "thinking_delta", "thinking": text}
                return opening if self._omitted else opening + self._delta(thinking, after)
            case CallStart(index, name):
                id = call_id(self._context, index)
                return self._opened({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(_, fragment):
                return self._delta({"type": "input_json_delta", "partial_json": fragment}, after)
            case CallEnd():
                return self._closed()

    def close(self) -> bytes:
        """The end of the last block. Every response has at least one."""
        return (self._opened({"type": "text", "text": ""}) if self._index < 0 else b"") + self._closed()

    def _opened(self, block: dict[str, Any]) -> bytes:
        before = self._closed()
        self._index += 1
        self._open = str(block["type"])
        return before + frame.named("content_block_start", index=self._index, content_block=block)

    def _closed(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signed = b""
        if kind == "thinking":
            signature = b64encode(self._digest.digest()).decode()
            signed = self._delta({"type": "signature_delta", "signature": signature}, b"}\n\n")
            self._digest = sha256()
        return signed + frame.named("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any], after: bytes) -> bytes:
        data = to_json({"type": "content_block_delta", "index": self._index, "delta": delta})
        return b"event: content_block_delta\ndata: " + data[:-1] + after
