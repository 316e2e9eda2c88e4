"""Scans arguments that are written between tags, and makes JSON of them: `<parameter=city>Ulm</parameter>…`."""

import json
from collections.abc import Mapping

from frontend.output_parser.calls.prefix import partial_tag
from frontend.output_parser.calls.state_scanner import StateScanner
from frontend.output_parser.calls.tool_syntax import ParameterTags
from frontend.output_parser.parameter_kinds import Kind, as_json


class TaggedArguments(StateScanner):
    """Scans the parameters of one call; `argument_scanners` explains the attributes.

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
