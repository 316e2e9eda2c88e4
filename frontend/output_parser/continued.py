"""Parses output that continues earlier text: parses both as one output, but yields only the events of the continuation.

A tool call that began in the earlier text is yielded as a whole, with its name, as no client could use the end of its
arguments alone.
"""

from collections.abc import Sequence

from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.parser import OutputParser


class ContinuedParser:
    """Parses what follows the earlier texts, as an OutputParser. The first call that it yields has number 0."""

    def __init__(self, parser: OutputParser, before: Sequence[str]) -> None:
        """before: the earlier texts. `parser` has parsed nothing yet."""
        self._parser = parser
        self._complete = 0  # the number of complete calls in the earlier texts
        self._open: list[Event] = []  # the events of the call that the earlier texts leave incomplete
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
        """Whether the parser is inside reasoning, is past it, or may still see it begin."""
        return self._parser.reasoning

    @property
    def called(self) -> bool:
        """Whether the whole output has a complete call and no incomplete call."""
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
