"""Collects the events of one output into its parts, for responses that are not streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from frontend.output_parser.calls.json_stream import JsonObjectScanner
from frontend.output_parser.continued import ContinuedParser
from frontend.output_parser.counting import feed_counting
from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig
from frontend.output_parser.parser import OutputParser, output_parser


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is JSON, or the beginning of JSON if the output was cut off."""

    name: str
    arguments: str = ""

    @property
    def closed_arguments(self) -> str:
        """The arguments up to the last complete member, with the brackets closed: always valid JSON."""
        scanner = JsonObjectScanner()
        scanned = scanner.feed(self.arguments)
        return scanned if scanner.done else scanner.closed(scanned)


@dataclass(slots=True)
class ParsedOutput:
    """The parts of one output, in order. Adjacent parts of one kind are merged."""

    parser: OutputParser
    parts: list[Text | ReasoningText | Call] = field(default_factory=list)
    reasoning_tokens: int = 0

    @classmethod
    def parse(
        cls, texts: Sequence[str], parser_config: ParserConfig, tokens: int = 0, before: Sequence[str] = ()
    ) -> Self:
        """Parses a whole output. texts, tokens: as for `feed_counting`; before: earlier texts that `texts` continue"""
        parser = output_parser(parser_config)
        parsed = cls(ContinuedParser(parser, before) if before else parser)
        events, parsed.reasoning_tokens = feed_counting(parsed.parser, texts, tokens)
        for event in events + parsed.parser.finish():
            parsed.add(event)
        return parsed

    def add(self, event: Event) -> None:
        match self.parts[-1:], event:
            case [Text(before)], Text(text):
                self.parts[-1] = Text(before + text)
            case [ReasoningText(before)], ReasoningText(text):
                self.parts[-1] = ReasoningText(before + text)
            case [Call() as call], CallArguments(_, fragment):
                call.arguments += fragment
            case _, CallStart(_, name):
                self.parts.append(Call(name))
            case _, Text() | ReasoningText():
                self.parts.append(event)

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Text)])

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, ReasoningText)])

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]
