"""The lines of Ollama's streams, and whole responses, which combine the contents of all lines."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from frontend.api.ollama import envelope
from frontend.api.ollama import response_types as types
from frontend.api.requests.encoding import to_json
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.api.totals import Totals
from frontend.errors import SluiceError
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.parser import output_parser
from frontend.request import Delta


class Said(NamedTuple):
    """A part of the model's output."""

    text: str = ""
    thinking: str = ""
    calls: tuple[types.OllamaCall, ...] = ()


# Makes an object of the response from a part of the output, all ids up to the end of this part, and more fields.
Make = Callable[[Said, list[int], dict[str, Any]], types.OllamaAnswer]


class Listener:
    """Turns deltas into text, reasoning and calls. A call is held back until it is complete, because its arguments are
    a JSON object in this format."""

    def __init__(self, context: ResponseContext) -> None:
        config = context.request.parser_config
        self._nonce = context.nonce
        self._parser = None if config is None else output_parser(config)
        self._names: list[str] = []
        self._arguments: list[str] = []

    def hear(self, delta: Delta) -> Iterable[Said]:
        if self._parser is None:
            return [Said(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text) + (self._parser.finish() if delta.finish is not None else [])
        return [said for event in events if any(said := self._said(event))]

    def _said(self, event: Event) -> Said:
        match event:
            case Text(text):
                return Said(text)
            case ReasoningText(text):
                return Said(thinking=text)
            case CallStart(_, name):
                self._names.append(name)
                self._arguments.append("")
            case CallArguments(index, fragment):
                self._arguments[index] += fragment
            case CallEnd(index):
                return Said(calls=(self._call(index),))
        return Said()

    def _call(self, index: int) -> types.OllamaCall:
        arguments = msgspec.json.decode(self._arguments[index], type=dict[str, Any])
        function = types.OllamaFunction(index=index, name=self._names[index], arguments=arguments)
        return types.OllamaCall(id=f"call_{self._nonce}{index:02x}", function=function)


class LineWriter:
    """Writes one response as lines of JSON."""

    def __init__(self, context: ResponseContext, make: Make) -> None:
        self._context, self._head = context, envelope.head(context)
        self._make = make
        self._totals = Totals(context.request)
        self._listener = Listener(context)
        self._ids: list[int] = []

    def write(self, deltas: list[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            self._totals.add(delta)
            self._ids += delta.ids
            lines += [self._line(said, {}) for said in self._listener.hear(delta)]
            if delta.finish is not None:
                lines.append(self._line(Said(), envelope.end(self._context, delta, self._totals.usage)))
        return b"".join(lines)

    def end(self) -> bytes:
        return b""

    def _line(self, said: Said, more: dict[str, Any]) -> bytes:
        return to_json(self._make(said, self._ids, self._head | more)) + b"\n"


async def complete(context: ResponseContext, arriving: AsyncDeltas, make: Make) -> bytes:
    """Returns the response of a request that does not stream."""
    totals, listener = Totals(context.request), Listener(context)
    parts: list[Said] = []
    ids: list[int] = []
    last: Delta | None = None
    async for deltas in arriving:
        for last in deltas:
            totals.add(last)
            ids += last.ids
            parts += listener.hear(last)
    if last is None or last.finish is None:
        raise SluiceError("the answer has no end")
    whole = Said(
        "".join([part.text for part in parts]),
        "".join([part.thinking for part in parts]),
        tuple([one for part in parts for one in part.calls]),
    )
    return to_json(make(whole, ids, envelope.head(context) | envelope.end(context, last, totals.usage)))
