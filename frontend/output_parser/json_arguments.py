"""Scans one JSON object as its text arrives, and knows at every character whether the text can still become JSON.

Builds no values: the caller has the text. https://www.rfc-editor.org/rfc/rfc8259

The grammar of a request with tools lets only JSON through. The scanner checks the text all the same, so that the
parser alone decides what is a call: text that is not JSON stays text.
"""

import json
import re
from collections.abc import Callable, Mapping

from frontend.output_parser.model_format import Kind, as_json
from frontend.output_parser.tool_syntax import ParameterTags, partial_tag

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


# The base of scanners that are state machines: each state is a method.

State = Callable[[], str | None]


class StateScanner:
    """The base of scanners; `JsonObjectScanner` explains the attributes.

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


# Scans arguments that are written between tags, and makes JSON of them: `<parameter=city>Ulm</parameter>…`.


class TaggedArguments(StateScanner):
    """Scans the parameters of one call; `JsonObjectScanner` explains the attributes.

    A string is returned as it arrives, any other value when it is complete. A second value for a parameter becomes
    text of the output.
    """

    def __init__(self, tags: ParameterTags, kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        self._tags = tags
        self._kinds = kinds
        self._key = ""
        self._keys: set[str] = set()
        self._begun = False  # whether the open value is a string whose beginning has been returned
        self._scan = self._between

    @property
    def held(self) -> str:
        """The JSON of the open value, as far as the value has arrived. Nothing else is held back."""
        value = self._text[: self._certain()] if self._scan == self._value else ""
        if self._kind is Kind.JSON:
            return value.lstrip()
        return self._string(value) if value else ""

    # the states

    def _between(self) -> str | None:
        text = self._text.lstrip()
        opening, end = self._tags.key[0], self._tags.end
        if text.startswith(opening):
            self._text, self._scan = text[len(opening) :], self._name
            return ""
        if text.startswith(end):
            self._text, self.done = text[len(end) :], True
            return "}" if self._keys else "{}"
        self.broken = not (opening.startswith(text) or end.startswith(text))
        return None

    def _name(self) -> str | None:
        key, found, rest = self._text.partition(self._tags.key[1])
        if not found:
            return None
        self._key = key.strip()
        if self._key in self._keys:
            self._text = self._tags.key[0] + self._text
            self.broken = True
            return None
        self._text, self._scan = rest, self._open_value
        opening = ", " if self._keys else "{"
        self._keys.add(self._key)
        return f"{opening}{json.dumps(self._key, ensure_ascii=False)}: "

    def _open_value(self) -> str | None:
        opening = self._tags.value[0]
        text = self._text.lstrip() if opening else self._text
        if len(text) < len(opening) and opening.startswith(text):
            return None
        if not text.startswith(opening):
            self.broken = True
            return None
        text = text[len(opening) :]
        if self._tags.lines and not text:
            return None
        self._text = text.removeprefix("\n") if self._tags.lines else text
        self._begun, self._scan = False, self._value
        return ""

    def _value(self) -> str | None:
        value, found, rest = self._text.partition(self._tags.value[1])
        if not found:
            return self._beginning()
        self._text, self._scan = rest, self._between
        value = value.removesuffix("\n") if self._tags.lines else value
        return self._string(value) + '"' if self._kind is Kind.TEXT else as_json(value, self._kind)

    @property
    def _kind(self) -> Kind:
        return self._kinds.get(self._key, Kind.TEXT)

    def _beginning(self) -> str | None:
        """Returns as much of an open string as is certain."""
        certain = self._certain()
        if self._kind is not Kind.TEXT or not certain:
            return None
        text, self._text = self._text[:certain], self._text[certain:]
        return self._string(text)

    def _certain(self) -> int:
        """Returns how many characters of the text certainly belong to the value."""
        certain = len(self._text) - partial_tag(self._text, self._tags.value[1])
        return certain - (self._tags.lines and self._text[:certain].endswith("\n"))

    def _string(self, text: str) -> str:
        """Returns a part of a JSON string; the first part has the opening quote."""
        opening, self._begun = "" if self._begun else '"', True
        return opening + json.dumps(text, ensure_ascii=False)[1:-1]
