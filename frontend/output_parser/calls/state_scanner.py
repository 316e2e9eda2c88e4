"""The base of scanners that are state machines: each state is a method."""

from collections.abc import Callable

State = Callable[[], str | None]


class StateScanner:
    """The base of scanners; `argument_scanners` explains the attributes.

    A state consumes `_text` and returns JSON of the consumed text, or None if it needs more text. It may set `_scan`
    to the next state.
    """

    _scan: State

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._text = ""  # text that no state has consumed yet

    def feed(self, text: str) -> str:
        """Scans the next piece. Nothing more may be fed once the scanner is `done` or `broken`."""
        self._text += text
        parts: list[str] = []
        while not (self.done or self.broken):
            found = self._scan()
            if found is None:
                break
            parts.append(found)
        if self.done or self.broken:
            self.rest = self._text
        return "".join(parts)
