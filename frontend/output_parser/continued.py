"""Parses the rest of an output as the end of the whole output, and yields the events of the rest only.

A tool call that began before the rest is yielded as a whole, with its name, as no client could use the end of its
arguments alone.
"""

from collections.abc import Sequence

from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.parser import OutputParser


class ContinuedParser:
    """An OutputParser of the rest. It numbers calls from the first one that it yields."""

    def __init__(self, parser: OutputParser, before: Sequence[str]) -> None:
        """before: the texts before the rest. `parser` has parsed nothing yet."""
        self._parser = parser
        self._complete = 0  # the number of calls that were complete before the rest
        self._open: list[Event] = []  # the events of the call that was not complete
        for event in parser.feed("".join(before)):
            match event:
                case CallStart():
                    self._open = [event]
                case CallArguments():
                    self._open.append(event)
                case CallEnd(call):
                    self._open, self._complete = [], call + 1

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is now inside reasoning, after it, or reasoning may still begin."""
        return self._parser.reasoning

    @property
    def called(self) -> bool:
        """Whether the whole output has completed a call, and has no incomplete one."""
        return self._parser.called

    def feed(self, text: str) -> list[Event]:
        return self._rest_of(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._rest_of(self._parser.finish())

    def _rest_of(self, events: list[Event]) -> list[Event]:
        events, self._open = [*self._open, *events], []
        return [self._renumbered(event) for event in events]

    def _renumbered(self, event: Event) -> Event:
        match event:
            case CallStart(call) | CallArguments(call) | CallEnd(call):
                return event._replace(call=call - self._complete)
            case _:
                return event
