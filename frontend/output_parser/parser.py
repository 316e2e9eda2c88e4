"""Parses the text of one output as it arrives: finds reasoning and tool calls. Knows neither tokens nor API formats.

Events are final, and no text is lost: a piece that turns out to be no tag, no call of an offered function, or no
arguments becomes text. Only three things are dropped: the format's own tags, the white space around them, and a call
that was cut off before its arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from frontend.output_parser.calls.call_parser import CallParser
from frontend.output_parser.calls.mistral_args import AnswerText, MistralParser
from frontend.output_parser.calls.prefix import partial_tag
from frontend.output_parser.events import Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.harmony import HarmonyParser, UserText
from frontend.output_parser.unseparated import UnseparatedParser


class Body(Protocol):
    """Parses everything that is not reasoning."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class OutputParser(Protocol):
    """Parses one output: call `feed` with each piece of text, then `finish`. Afterwards `called` says whether the
    output called a function."""

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, is past it, or may still see it begin."""

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class TaggedParser:
    """Parses an output whose reasoning and calls stand in its text, between tags."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._reasoning = parser_config.reasoning
        self._opening, self._closing = parser_config.tags
        self._calls = CallParser(parser_config) if parser_config.function_names else None
        self._body: Body = self._calls or TextOnly()
        self._text = ""  # text that may still turn out to be a tag
        self._leading = True  # whether line breaks are dropped, because they follow the opening tag

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, is past it, or may still see it begin."""
        return self._reasoning

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self._calls is not None and self._calls.calls.called

    def feed(self, text: str) -> list[Event]:
        match self._reasoning:
            case Reasoning.UNDECIDED:
                return self._feed_undecided(text)
            case Reasoning.OPEN:
                return self._feed_reasoning(text)
            case _:
                return self._body.feed(text)

    def finish(self) -> list[Event]:
        text, self._text = self._text, ""
        if self._reasoning is Reasoning.OPEN:
            return [ReasoningText(text)] if text else []
        return self._body.feed(text) + self._body.finish()

    def _feed_undecided(self, text: str) -> list[Event]:
        self._text += text
        start = self._text.lstrip()
        if len(start) < len(self._opening) and self._opening.startswith(start):
            return []
        text, self._text = self._text, ""
        if not start.startswith(self._opening):
            self._reasoning = Reasoning.DONE
            return self._body.feed(text)
        self._reasoning = Reasoning.OPEN
        return self._feed_reasoning(start[len(self._opening) :])

    def _feed_reasoning(self, text: str) -> list[Event]:
        self._text += text
        if self._leading:
            self._text = self._text.lstrip("\n")
            self._leading = not self._text
        reasoning, tag, rest = self._text.partition(self._closing)
        if tag:
            self._reasoning, self._text = Reasoning.DONE, ""
            self._body = _SkipLineBreaks(self._body)
            reasoning = reasoning.rstrip("\n")
            return [*([ReasoningText(reasoning)] if reasoning else []), *self.feed(rest)]
        cut = len(self._text[: len(self._text) - partial_tag(self._text, self._closing)].rstrip("\n"))
        reasoning, self._text = self._text[:cut], self._text[cut:]
        return [ReasoningText(reasoning)] if reasoning else []


class TextOnly:
    """Parses an output that cannot call functions, except its reasoning."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _SkipLineBreaks:
    """Drops the line breaks after reasoning, and passes the rest of the text on."""

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


@dataclass(frozen=True, slots=True)
class Strategy:
    """How output of a format is parsed, and in which part of its text stop strings are searched."""

    parser: Callable[[ParserConfig], OutputParser]
    searched: Callable[[ParserConfig], Callable[[str], str]]


def _tagged(parser_config: ParserConfig) -> OutputParser:
    if parser_config.reasoning_is_text and parser_config.reasoning is not Reasoning.DONE:
        return UnseparatedParser(
            parser_config.reasoning, parser_config.tags, TaggedParser(replace(parser_config, reasoning=Reasoning.DONE))
        )
    return TaggedParser(parser_config)


TAGS = Strategy(_tagged, lambda _: str)
STRATEGIES: Mapping[ToolFormat, Strategy] = {
    ToolFormat.HARMONY: Strategy(HarmonyParser, UserText),
    ToolFormat.MISTRAL_ARGS: Strategy(MistralParser, AnswerText),
}


def output_parser(parser_config: ParserConfig) -> OutputParser:
    """Creates the parser of a new output."""
    return STRATEGIES.get(parser_config.tool_format, TAGS).parser(parser_config)


def searched_text(parser_config: ParserConfig | None) -> Callable[[str], str]:
    """Returns a function that turns each piece of a new output into the text in which stop strings are searched."""
    return STRATEGIES.get(parser_config.tool_format, TAGS).searched(parser_config) if parser_config else str
