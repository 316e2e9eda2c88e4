"""Counts the calls of one output, and follows the arguments of the open call."""

from collections.abc import Callable

from frontend.output_parser.calls.argument_scanners import ArgumentScanner
from frontend.output_parser.calls.json_stream import JsonObjectScanner
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event


class Calls:
    """The calls of one output.

    begun, completed: how many calls have begun, and how many have complete arguments
    open: whether the arguments of the last call may go on
    broke: whether the arguments of the last call are not JSON
    """

    __slots__ = ("_scanner", "_scanner_of", "begun", "broke", "completed")

    def __init__(self, scanner_of: Callable[[str], ArgumentScanner] = lambda _: JsonObjectScanner()) -> None:
        """scanner_of: creates the scanner of the arguments of a function"""
        self._scanner_of = scanner_of
        self.begun = 0
        self.completed = 0
        self.broke = False
        self._scanner: ArgumentScanner | None = None

    @property
    def open(self) -> bool:
        return self._scanner is not None

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self.completed > 0 and self._scanner is None

    def begin(self, name: str) -> Event:
        """Begins a call. Its arguments follow."""
        self._scanner = self._scanner_of(name)
        self.begun += 1
        return CallStart(self.begun - 1, name)

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Feeds arguments of the open call; returns their events, and the text after them or from where they broke."""
        scanner = self._scanner
        if scanner is None:
            return [], text
        events: list[Event] = []
        if fragment := scanner.feed(text):
            events.append(CallArguments(self.begun - 1, fragment))
        if scanner.done:
            events.append(CallEnd(self.begun - 1))
            self.completed += 1
        if scanner.done or scanner.broken:
            self._scanner, self.broke = None, scanner.broken
        return events, scanner.rest

    def held(self) -> list[Event]:
        """Returns the arguments that were held back. Called when the output ends within the open call."""
        rest = self._scanner.held if self._scanner else ""
        return [CallArguments(self.begun - 1, rest)] if rest else []

    def drop(self) -> None:
        """Abandons the open call, whose arguments other output interrupts."""
        self._scanner = None
