"""Scans arguments that are written as literals of a language near JSON, and makes JSON of them.

(city="Ulm", days=[1, 2], exact=True)         Python's keyword arguments
{city:<|"|>Ulm<|"|>,days:[1,2],exact:true}    Gemma 4's objects: names have no quotes, strings have the token <|"|>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.output_parser.json_arguments import COMPLETE_SCALAR, StateScanner
from frontend.output_parser.model_format import PYTHON_WORDS
from frontend.output_parser.tool_syntax import BARE_QUOTE, partial_tag

SPACE = re.compile(r"\s*")
WORD = re.compile(r"[-+.\w]*")
ESCAPES: Mapping[str, str] = {
    **{char: f"\\{char}" for char in 'nrtbf"\\'}, "'": "'", "/": "/", "\n": "", "a": "\\u0007", "v": "\\u000b",
    "0": "\\u0000",
}  # fmt: skip
HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Language:
    """How literals are written.

    brackets: the two brackets around all arguments
    after_name: the character between a parameter's name and its value
    quotes: the marks that may open and close a string
    escapes: whether a backslash in a string begins an escape
    name: a regex of a name without quotes
    bare_names: whether the names in inner objects have no quotes
    """

    brackets: str
    after_name: str
    quotes: tuple[str, ...]
    escapes: bool
    name: re.Pattern[str]
    bare_names: bool


PYTHON = Language(
    "()", "=", ('"', "'"), escapes=True, name=re.compile(r"""[^\s=,()\[\]{}"'][^=,()\[\]{}"']*"""), bare_names=False
)
BARE = Language(
    "{}", ":", (BARE_QUOTE,), escapes=False, name=re.compile(r"[^\s:,{}\[\]<][^:,{}\[\]<]*"), bare_names=True
)


class LiteralArguments(StateScanner):
    """Scans the arguments of one call; strings are returned as they arrive. See `JsonObjectScanner`."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self._language = language
        self._closing: list[str] = []  # the closing brackets that JSON still needs
        self._comma = ""  # the text before the next name or value: a comma or nothing
        self._quote = ""  # the quote that opened the open string
        self._in_name = False  # whether the open string is a name
        self._scan = self._open

    @property
    def held(self) -> str:
        """The JSON of a number or a word at the end of the text, which more text may continue."""
        word = self._text.strip() if self._scan == self._value else ""
        return self._comma + word if COMPLETE_SCALAR.fullmatch(word) else ""

    # the states

    def _open(self) -> str | None:
        if not self._take(self._language.brackets[0]):
            return self._break()
        return self._push("{}")

    def _name(self) -> str | None:
        """Scans a parameter's or a member's name, or the end of the object."""
        if not self._skip_space():
            return None
        if self._ends():
            return self._pop()
        found = self._language.name.match(self._text) if self._bare else None
        if found is None:
            return self._string_or_break(in_name=True)
        if found.end() == len(self._text):
            return None
        name, self._text, self._scan = found[0].rstrip(), self._text[found.end() :], self._after_name
        comma, self._comma = self._comma, ""
        return comma + json.dumps(name, ensure_ascii=False)

    def _after_name(self) -> str | None:
        if not self._skip_space():
            return None
        after = self._language.after_name if len(self._closing) == 1 else ":"
        if not self._take(after):
            return self._break()
        self._scan = self._value
        return ": "

    def _value(self) -> str | None:
        if not self._skip_space():
            return None
        char = self._text[0]
        if self._closing[-1] == "]" and char == "]":
            return self._pop()
        if char in "{[":
            self._text = self._text[1:]
            return self._push("{}" if char == "{" else "[]")
        end = WORD.match(self._text).end()  # type: ignore[union-attr]
        if not end:
            return self._string_or_break(in_name=False)
        if end == len(self._text):
            return None
        word = PYTHON_WORDS.get(self._text[:end], self._text[:end])
        if not COMPLETE_SCALAR.fullmatch(word):
            return self._break()
        comma, self._comma = self._comma, ""
        self._text, self._scan = self._text[end:], self._after_value
        return comma + word

    def _after_value(self) -> str | None:
        if not self._skip_space():
            return None
        if self._ends():
            return self._pop()
        if not self._take(","):
            return self._break()
        self._comma = ", "
        self._scan = self._value if self._closing[-1] == "]" else self._name
        return ""

    def _string_or_break(self, in_name: bool) -> str | None:
        """Begins a string. It is a name if `in_name`, otherwise a value."""
        for quote in self._language.quotes:
            if self._text.startswith(quote):
                self._quote, self._in_name, self._scan = quote, in_name, self._string
                self._text = self._text[len(quote) :]
                comma, self._comma = self._comma, ""
                return f'{comma}"'
        return None if any(quote.startswith(self._text) for quote in self._language.quotes) else self._break()

    def _string(self) -> str | None:
        text, quote = self._text, self._quote
        end = text.find(quote)
        escape = text.find("\\") if self._language.escapes else -1
        if escape >= 0 and (end < 0 or escape < end):
            return self._escape(escape)
        if end >= 0:
            self._text = text[end + len(quote) :]
            self._scan = self._after_name if self._in_name else self._after_value
            return _inner(text[:end]) + '"'
        certain = len(text) - partial_tag(text, quote)
        if not certain:
            return None
        self._text = text[certain:]
        return _inner(text[:certain])

    def _escape(self, at: int) -> str | None:
        """Scans the string up to an escape, and the escape."""
        text = self._text
        before, char, after = _inner(text[:at]), text[at + 1 : at + 2], text[at + 2 :]
        if not char:
            self._text = text[at:]
            return before or None
        digits = HEX.get(char, 0)
        if len(after) < digits:
            self._text = text[at:]
            return before or None
        if digits:
            try:
                shown = _inner(chr(int(after[:digits], 16)), escaped=True)
            except (ValueError, OverflowError):
                self._text = text[at:]  # the string up to the escape is returned first, in whatever pieces it came
                return before or self._break()
        else:
            shown = ESCAPES.get(char, f"\\\\{char}")
        self._text = after[digits:]
        return before + shown

    # methods that the states share

    @property
    def _bare(self) -> bool:
        return len(self._closing) == 1 or self._language.bare_names

    def _skip_space(self) -> bool:
        """Drops white space; returns whether more text follows."""
        self._text = self._text[SPACE.match(self._text).end() :]  # type: ignore[union-attr]
        return bool(self._text)

    def _take(self, word: str) -> bool:
        found = self._text.startswith(word)
        self._text = self._text[len(word) * found :]
        return found

    def _ends(self) -> bool:
        """Whether the text begins with the bracket that closes the open one."""
        end = self._language.brackets[1] if len(self._closing) == 1 else self._closing[-1]
        return self._text[0] == end

    def _push(self, brackets: str) -> str:
        comma, self._comma = self._comma, ""
        self._closing.append(brackets[1])
        self._scan = self._name if brackets == "{}" else self._value
        return comma + brackets[0]

    def _pop(self) -> str:
        self._text, self._comma = self._text[1:], ""
        closing = self._closing.pop()
        self.done = not self._closing
        self._scan = self._after_value
        return closing

    def _break(self) -> str | None:
        self.broken = True
        return None


def _inner(text: str, escaped: bool = False) -> str:
    """Returns text as a part of a JSON string, without the quotes. escaped: whether non-ASCII characters are escaped"""
    return json.dumps(text, ensure_ascii=escaped)[1:-1]
