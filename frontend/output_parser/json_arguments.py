"""Scans one JSON object as its text arrives, and knows at every character whether the text can still become JSON.

Builds no values: the caller has the text. https://www.rfc-editor.org/rfc/rfc8259

The grammar of a request with tools lets only JSON through. The scanner checks the text all the same, so that the
parser alone decides what is a call: text that is not JSON stays text.
"""

import re
from collections.abc import Callable

SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
COMPLETE_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
CLOSING = {"{": "}", "[": "]"}


class JsonObjectScanner:
    """Scans one object; `feed` returns the text that certainly belongs to it.

    done: whether the object is complete
    broken: whether the text is not JSON
    rest: the text after the object, or from the character that broke it
    held: a number or a word at the end that may continue
    """

    __slots__ = (
        "_brackets", "_expect", "_hex_digits", "_in_key", "_safe", "_scanned",
        "broken", "done", "held", "rest",
    )  # fmt: skip

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self.held = ""
        self._expect: Callable[[str, int], int] = self._open
        self._brackets: list[str] = []  # the brackets that are open
        self._in_key = False  # whether the open string is a member's name
        self._hex_digits = 0  # how many digits a \u escape still lacks
        self._scanned = 0  # how many characters `feed` has returned
        self._safe = (0, "{}")  # a position in the text, and the brackets that close the object there

    def feed(self, text: str) -> str:
        """Scans the next piece. Nothing more may be fed once the scanner is `done` or `broken`."""
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
        self._scanned += at
        return text[:at]

    def closed(self, scanned: str) -> str:
        """Returns valid JSON: `scanned` (all that `feed` returned) up to the last complete member, then brackets."""
        at, closing = self._safe
        return scanned[:at] + closing

    # Each state consumes from `at` and returns the new position; returning `at` means that more input is needed.

    def _open(self, text: str, at: int) -> int:
        return self._push(text, at) if text[at] == "{" else self._break(at)

    def _member(self, text: str, at: int) -> int:
        """Scans a member's name or, right after the bracket, the end of the object."""
        if (at := self._space(text, at)) == len(text):
            return at
        if text[at] == '"':
            self._in_key, self._expect = True, self._string
            return at + 1
        return self._pop(text, at) if self._closes_empty(text[at]) else self._break(at)

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
            self._in_key, self._expect = False, self._string
            return at + 1
        if self._closes_empty(text[at]):
            return self._pop(text, at)
        self._expect = self._scalar
        return self._scalar(text, at)

    def _scalar(self, text: str, at: int) -> int:
        end = SCALAR.match(text, at).end()  # type: ignore[union-attr]
        if end == len(text):
            return at
        return self._completed(end) if COMPLETE_SCALAR.fullmatch(text, at, end) else self._break(at)

    def _string(self, text: str, at: int) -> int:
        at = PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._expect = self._escape
            return at + 1
        if text[at] != '"':
            return self._break(at)
        if not self._in_key:
            return self._completed(at + 1)
        self._expect = self._colon
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if self._hex_digits:
            self._hex_digits -= 1
            self._expect = self._escape if self._hex_digits else self._string
            return at + 1 if text[at] in "0123456789abcdefABCDEF" else self._break(at)
        if text[at] == "u":
            self._hex_digits = 4
            return at + 1
        self._expect = self._string
        return at + 1 if text[at] in '"\\/bfnrt' else self._break(at)

    def _after_value(self, text: str, at: int) -> int:
        if (at := self._space(text, at)) == len(text):
            return at
        if text[at] == ",":
            self._expect = self._member_after_comma if self._brackets[-1] == "{" else self._value_after_comma
            return at + 1
        return self._pop(text, at)

    def _member_after_comma(self, text: str, at: int) -> int:
        """Scans a member's name; the object may not end here."""
        if (at := self._space(text, at)) == len(text):
            return at
        return self._member(text, at) if text[at] == '"' else self._break(at)

    def _value_after_comma(self, text: str, at: int) -> int:
        if (at := self._space(text, at)) == len(text):
            return at
        return self._value(text, at) if text[at] != "]" else self._break(at)

    # methods that the states share

    def _space(self, text: str, at: int) -> int:
        return SPACE.match(text, at).end()  # type: ignore[union-attr]

    def _closes_empty(self, char: str) -> bool:
        """Whether `char` closes an object or array that is still empty."""
        empty = self._expect == (self._member if self._brackets[-1] == "{" else self._value)
        return empty and char == CLOSING[self._brackets[-1]]

    def _push(self, text: str, at: int) -> int:
        self._brackets.append(text[at])
        self._expect = self._member if text[at] == "{" else self._value
        return self._mark(at + 1)

    def _pop(self, text: str, at: int) -> int:
        if text[at] != CLOSING[self._brackets[-1]]:
            return self._break(at)
        self._brackets.pop()
        self.done = not self._brackets
        return self._completed(at + 1)

    def _completed(self, at: int) -> int:
        self._expect = self._after_value
        return self._mark(at)

    def _mark(self, at: int) -> int:
        self._safe = self._scanned + at, "".join(CLOSING[bracket] for bracket in reversed(self._brackets))
        return at

    def _break(self, at: int) -> int:
        self.broken = True
        return at
