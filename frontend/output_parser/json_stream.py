"""Follows one JSON object as its text arrives, and knows at every character whether it can still become one.

Values are not built: who wants them has the text. https://www.rfc-editor.org/rfc/rfc8259
"""

import re
from collections.abc import Callable

SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
WHOLE_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
CLOSING = {"{": "}", "[": "]"}


class JsonObjectScanner:
    """`feed` gives back what certainly belongs to the object; `rest` is what came after it, or broke it."""

    __slots__ = ("_expect", "_given", "_hex", "_key", "_safe", "_stack", "broken", "done", "held", "rest")

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self.held = ""  # a number or a word that may go on
        self._expect: Callable[[str, int], int] = self._open
        self._stack: list[str] = []
        self._key = False  # whether the string that is open names a member
        self._hex = 0  # digits missing of a \u escape
        self._given = 0  # characters given back
        self._safe = (0, "{}")  # up to here, with these closing brackets, it is whole

    def feed(self, text: str) -> str:
        """The next piece. Afterwards it may be `done` or `broken`, and then nothing more may come."""
        text, self.held = self.held + text, ""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            after = self._expect(text, at)
            if after == at and not self.broken:
                self.held = text[at:]
                break
            at = after
        if self.done or self.broken:
            self.rest = text[at:]
        self._given += at
        return text[:at]

    def closed(self, given: str) -> str:
        """`given`, all that was given back so far, up to its last whole member and closed there: JSON in any case."""
        at, closing = self._safe
        return given[:at] + closing

    # Each takes the text and a place in it and gives the place after what it took; the same place is: not enough.

    def _open(self, text: str, at: int) -> int:
        return self._push(text, at) if text[at] == "{" else self._break(at)

    def _member(self, text: str, at: int) -> int:
        """A name, or, right after the bracket, the end."""
        if (at := self._space(text, at)) == len(text):
            return at
        if text[at] == '"':
            self._key, self._expect = True, self._string
            return at + 1
        return self._pop(text, at) if self._fresh(text[at]) else self._break(at)

    def _colon(self, text: str, at: int) -> int:
        if (at := self._space(text, at)) == len(text):
            return at
        self._expect = self._value
        return at + 1 if text[at] == ":" else self._break(at)

    def _value(self, text: str, at: int) -> int:
        if (at := self._space(text, at)) == len(text):
            return at
        if text[at] in CLOSING:
            return self._push(text, at)
        if text[at] == '"':
            self._key, self._expect = False, self._string
            return at + 1
        if self._fresh(text[at]):
            return self._pop(text, at)
        self._expect = self._scalar
        return self._scalar(text, at)

    def _scalar(self, text: str, at: int) -> int:
        end = SCALAR.match(text, at).end()  # type: ignore[union-attr]
        if end == len(text):
            return at
        return self._whole(end) if WHOLE_SCALAR.fullmatch(text, at, end) else self._break(at)

    def _string(self, text: str, at: int) -> int:
        at = PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = self._escape
            return at + 1
        if text[at] != '"':
            return self._break(at)
        if not self._key:
            return self._whole(at + 1)
        self._expect = self._colon
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if self._hex:
            self._hex -= 1
            self._expect = self._escape if self._hex else self._string
            return at + 1 if text[at] in "0123456789abcdefABCDEF" else self._break(at)
        if text[at] == "u":
            self._hex = 4
            return at + 1
        self._expect = self._string
        return at + 1 if text[at] in '"\\/bfnrt' else self._break(at)

    def _next(self, text: str, at: int) -> int:
        """After a value."""
        if (at := self._space(text, at)) == len(text):
            return at
        if text[at] == ",":
            self._expect = self._named if self._stack[-1] == "{" else self._another
            return at + 1
        return self._pop(text, at)

    def _named(self, text: str, at: int) -> int:
        """A member, and no end: there was a comma."""
        if (at := self._space(text, at)) == len(text):
            return at
        return self._member(text, at) if text[at] == '"' else self._break(at)

    def _another(self, text: str, at: int) -> int:
        if (at := self._space(text, at)) == len(text):
            return at
        return self._value(text, at) if text[at] != "]" else self._break(at)

    # what they share

    def _space(self, text: str, at: int) -> int:
        return SPACE.match(text, at).end()  # type: ignore[union-attr]

    def _fresh(self, char: str) -> bool:
        """Whether `char` closes a bracket that nothing has followed yet."""
        empty = self._expect == (self._member if self._stack[-1] == "{" else self._value)
        return empty and char == CLOSING[self._stack[-1]]

    def _push(self, text: str, at: int) -> int:
        self._stack.append(text[at])
        self._expect = self._member if text[at] == "{" else self._value
        return self._mark(at + 1)

    def _pop(self, text: str, at: int) -> int:
        if text[at] != CLOSING[self._stack[-1]]:
            return self._break(at)
        self._stack.pop()
        self.done = not self._stack
        return self._whole(at + 1)

    def _whole(self, at: int) -> int:
        self._expect = self._next
        return self._mark(at)

    def _mark(self, at: int) -> int:
        self._safe = self._given + at, "".join(CLOSING[bracket] for bracket in reversed(self._stack))
        return at

    def _break(self, at: int) -> int:
        self.broken = True
        return at
