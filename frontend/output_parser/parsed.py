"""An answer's events folded into its parts: for answers that go out whole."""

from dataclasses import dataclass, field
from typing import Self

from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig
from frontend.output_parser.json_stream import JsonObjectScanner
from frontend.output_parser.parser import OutputParser


@dataclass(slots=True)
class Call:
    """`arguments` is JSON, or the beginning of it where the answer was cut off."""

    name: str
    arguments: str = ""

    @property
    def closed(self) -> str:
        """JSON in any case: up to the last whole member."""
        scan = JsonObjectScanner()
        given = scan.feed(self.arguments)
        return given if scan.done else scan.closed(given)


@dataclass(slots=True)
class ParsedOutput:
    """`parts` are in the order of the answer; neighbours of a kind are one."""

    parser: OutputParser
    parts: list[Text | ReasoningText | Call] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, parser_config: ParserConfig) -> Self:
        said = cls(OutputParser(parser_config))
        for event in said.parser.feed(text) + said.parser.finish():
            said.add(event)
        return said

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
