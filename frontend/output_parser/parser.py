"""Reads an answer's text as it arrives and finds the thoughts and calls in it. Knows neither tokens nor dialects.

Events are final, and nothing is lost: what turns out to be no tag, a call of an unknown function, or a call that is not
JSON is text. Only the format's own tags, and the blanks around them, are dropped.
"""

import json
import re
from typing import NamedTuple, Protocol

from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import CLOSE, OPEN, ParserConfig, Reasoning
from frontend.output_parser.json_stream import JsonObjectScanner
from frontend.output_parser.tool_syntax import FORMS, Head

BLANKS = re.compile(r"\s*")
STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)("?)')


class Found(NamedTuple):
    """A head in a text: `end` is where the arguments begin, None while the text is too short to tell."""

    name: str = ""
    end: int | None = None


class Body(Protocol):
    """Reads what is not thought."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class OutputParser:
    """One answer's. `feed` what is released, then `finish`; afterwards `called` says how it ended."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._thinking = parser_config.thinking
        self._calls = Calls(parser_config) if parser_config.names else None
        self._body: Body = self._calls or Plain()
        self._text = ""
        self._leading = True  # nothing has been thought yet: line breaks belong to the tag

    @property
    def thinking(self) -> Reasoning:
        """Where it is now."""
        return self._thinking

    @property
    def called(self) -> bool:
        """Whether it has made a call, and none that it did not finish."""
        return self._calls is not None and self._calls.ended > 0 and self._calls.arguments is None

    def feed(self, text: str) -> list[Event]:
        match self._thinking:
            case Reasoning.MAYBE:
                return self._maybe(text)
            case Reasoning.INSIDE:
                return self._inside(text)
            case _:
                return self._body.feed(text)

    def finish(self) -> list[Event]:
        text, self._text = self._text, ""
        if self._thinking is Reasoning.INSIDE:
            return [ReasoningText(text)] if text else []
        return self._body.feed(text) + self._body.finish()

    def _maybe(self, text: str) -> list[Event]:
        self._text += text
        start = self._text.lstrip()
        if len(start) < len(OPEN) and OPEN.startswith(start):
            return []
        text, self._text = self._text, ""
        if not start.startswith(OPEN):
            self._thinking = Reasoning.OVER
            return self._body.feed(text)
        self._thinking = Reasoning.INSIDE
        return self._inside(start[len(OPEN) :])

    def _inside(self, text: str) -> list[Event]:
        self._text += text
        if self._leading:
            self._text = self._text.lstrip("\n")
            self._leading = not self._text
        thought, tag, rest = self._text.partition(CLOSE)
        if tag:
            self._thinking, self._text = Reasoning.OVER, ""
            self._body = _SkipBreaks(self._body)
            said = thought.rstrip("\n")
            return [*([ReasoningText(said)] if said else []), *self.feed(rest)]
        cut = len(self._text[: len(self._text) - _held(self._text, CLOSE)].rstrip("\n"))
        thought, self._text = self._text[:cut], self._text[cut:]
        return [ReasoningText(thought)] if thought else []


class Plain:
    """Everything is text."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _SkipBreaks:
    """Drops the line breaks after a thought, and passes on the rest."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        return self._body.feed(text) if text else []

    def finish(self) -> list[Event]:
        return self._body.finish()


class Calls:
    """Text with calls in it: `ended` counts those that are whole, `arguments` follows the one that is open."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._names = parser_config.names
        self._form = FORMS[parser_config.calls]
        self._tag = self._form.tag
        self._text = ""
        self._due: list[str] = []  # what may still follow of the last call's tail
        self._any_text = False  # whether there was text
        self._count = 0  # calls that have begun
        self.ended = 0
        self.arguments: JsonObjectScanner | None = None

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        text, self._text = self._text, ""
        if self.arguments is not None:
            return [CallArguments(self._count - 1, rest)] if (rest := self.arguments.held) else []
        if self._due or (self._count and not text.strip()):
            return []
        return [Text(text)] if text else []

    def _step(self, events: list[Event]) -> bool:
        """Takes what can be taken; whether there may be more."""
        if self.arguments is not None:
            return self._feed_arguments(self.arguments, events)
        if self._due:
            return self._skip_tail()
        return self._find_call(events)

    def _find_call(self, events: list[Event]) -> bool:
        """For the next call, in text."""
        at = self._candidate()
        if at is None:
            return self._emit_text(len(self._text) - _blanks_and(self._text, self._tag), events)
        found = _head(self._text[at:], self._heads)
        if found.end is None:
            return self._emit_text(len(self._text[:at].rstrip()), events)
        if found.name not in self._names:
            return self._emit_text(at + max(1, len(self._tag)), events, more=True)
        self._emit_text(len(self._text[:at].rstrip()), events)
        self._text = self._text[len(self._text) - len(self._text.lstrip()) :]
        self._text = self._text[found.end :]
        events.append(CallStart(self._count, found.name))
        self._count += 1
        self.arguments = JsonObjectScanner()
        return True

    @property
    def _heads(self) -> tuple[Head, ...]:
        """Of the next call."""
        return self._form.further if self._count else self._form.heads

    def _candidate(self) -> int | None:
        """Where a call may begin: at a tag or, without tags, at the answer's first character or behind a call."""
        if self._tag:
            at = self._text.find(self._tag)
            return at if at >= 0 else None
        if self._any_text or not self._heads:
            return None
        return len(self._text) - len(self._text.lstrip())

    def _emit_text(self, end: int, events: list[Event], more: bool = False) -> bool:
        text, self._text = self._text[:end], self._text[end:]
        if text:
            self._any_text = True
            events.append(Text(text))
        return more

    def _feed_arguments(self, arguments: JsonObjectScanner, events: list[Event]) -> bool:
        text, self._text = self._text, ""
        if fragment := arguments.feed(text):
            events.append(CallArguments(self._count - 1, fragment))
        if arguments.broken:
            self._text, self.arguments, self._any_text = arguments.rest, None, True
        if arguments.done:
            events.append(CallEnd(self._count - 1))
            self.ended += 1
            self._text, self.arguments, self._due = arguments.rest, None, list(self._form.tail)
        return self.arguments is None

    def _skip_tail(self) -> bool:
        """Drops the tail of the last call as far as it is there; the rest is text."""
        text, due = self._text.lstrip(), self._due[0]
        if text.startswith(due):
            self._text = text[len(due) :]
            self._due.pop(0)
            return True
        if due.startswith(text):
            return False
        self._due.clear()
        return True


def _held(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may become `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _blanks_and(text: str, tag: str) -> int:
    """The same with the blanks before it; without a tag nothing has to wait."""
    return len(text) - len(text[: len(text) - _held(text, tag)].rstrip()) if tag else 0


def _head(text: str, heads: tuple[Head, ...]) -> Found:
    """The first head that `text` begins with; else the first that it may yet; else none (a name that is empty)."""
    founds = [found for head in heads if (found := _match(text, head)) is not None]
    return next((found for found in founds if found.end is not None), founds[0] if founds else Found("", 0))


def _match(text: str, head: Head) -> Found | None:
    at, name = 0, ""
    for word in (*head, "{"):
        at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if not word:
            string = STRING.match(text, at)
            if string is None:
                return Found() if at == len(text) else None
            if not string[2]:
                return Found() if string.end() >= len(text) - 1 else None
            name, at = _decoded(string[0]), string.end()
        elif text.startswith(word, at):
            at += len(word)
        else:
            return Found() if word.startswith(text[at:]) else None
    return Found(name, at - 1)


def _decoded(string: str) -> str:
    try:
        return str(json.loads(string))
    except ValueError:
        return ""
