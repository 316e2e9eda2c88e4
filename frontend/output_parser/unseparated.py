"""Parses output for clients that want reasoning and its tags in the text. Looks for tool calls only after reasoning."""

from typing import Protocol

from frontend.output_parser.events import Event, Text
from frontend.output_parser.formats import Reasoning, Tags


class Body(Protocol):
    """Parses the output after its reasoning."""

    @property
    def called(self) -> bool: ...
    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class UnseparatedParser:
    """Passes reasoning on as the model wrote it, and the rest of the output to another parser."""

    def __init__(self, reasoning: Reasoning, tags: Tags, body: Body) -> None:
        self._reasoning = reasoning
        self._opening, self._closing = tags
        self._body = body
        self._held = ""  # text that may still become an opening tag
        self._tail = ""  # the last characters of reasoning: they may belong to the closing tag

    @property
    def reasoning(self) -> Reasoning:
        return self._reasoning

    @property
    def called(self) -> bool:
        return self._body.called

    def feed(self, text: str) -> list[Event]:
        if self._reasoning is Reasoning.UNDECIDED:
            text = self._decide(text)
        if not text or self._reasoning is Reasoning.DONE:
            return self._body.feed(text)
        known = self._tail + text
        end = known.find(self._closing)
        if end < 0:
            self._tail = known[1 - len(self._closing) :]
            return [Text(text)]
        self._reasoning = Reasoning.DONE
        cut = end + len(self._closing) - len(self._tail)
        return [Text(text[:cut]), *self._body.feed(text[cut:])]

    def _decide(self, text: str) -> str:
        """Holds text back until it shows whether the output begins with reasoning. Returns "" until then, and then all
        the text."""
        self._held += text
        start = self._held.lstrip()
        if len(start) < len(self._opening) and self._opening.startswith(start):
            return ""
        self._reasoning = Reasoning.OPEN if start.startswith(self._opening) else Reasoning.DONE
        return self._held

    def finish(self) -> list[Event]:
        held = self._held if self._reasoning is Reasoning.UNDECIDED else ""
        return self._body.feed(held) + self._body.finish()
