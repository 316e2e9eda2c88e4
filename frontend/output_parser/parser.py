"""Parses the text of one output as it arrives: finds reasoning and tool calls. Knows neither tokens nor API formats.

Events are final, and no text is lost: a piece that turns out to be no tag, no call of an offered function, or no
arguments becomes text. Only three things are dropped: the format's own tags, the white space around them, and a call
that was cut off before its arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from frontend.output_parser.drift import ThoughtCalls, thought_calls_of
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.json_arguments import JsonObjectScanner
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.tool_calls import CallParser
from frontend.output_parser.tool_syntax import partial_tag


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
        self._thought_calls = _thought_calls(parser_config)
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
        certain = len(self._text)
        if self._thought_calls is not None:
            certain, calls = self._thought_calls.find(reasoning if tag else self._text)
            if calls:
                return self._call(certain)
        if tag:
            self._reasoning, self._text = Reasoning.DONE, ""
            self._body = _SkipLineBreaks(self._body)
            reasoning = reasoning.rstrip("\n")
            return [*([ReasoningText(reasoning)] if reasoning else []), *self.feed(rest)]
        certain = min(certain, len(self._text) - partial_tag(self._text, self._closing))
        cut = len(self._text[:certain].rstrip("\n"))
        reasoning, self._text = self._text[:cut], self._text[cut:]
        if self._thought_calls is not None:
            self._thought_calls.passed(reasoning)
        return [ReasoningText(reasoning)] if reasoning else []

    def ends_thought(self, closing: str) -> None:
        """Takes note that a call, which follows, ended the reasoning, so that the closing tag may stand behind it."""
        if self._calls is not None:
            self._calls.stray = closing

    def _call(self, at: int) -> list[Event]:
        """Ends the reasoning with the call that begins at `at`."""
        reasoning, text = self._text[:at].rstrip("\n"), self._text[at:]
        self._reasoning, self._text = Reasoning.DONE, ""
        self.ends_thought(self._closing)
        return [*([ReasoningText(reasoning)] if reasoning else []), *self._body.feed(text)]


def _thought_calls(parser_config: ParserConfig) -> ThoughtCalls | None:
    """Returns what looks for calls within reasoning; None if no call may stand there."""
    if not parser_config.drifts or parser_config.reasoning is Reasoning.DONE:
        return None
    return thought_calls_of(parser_config.tool_format, parser_config.function_names, parser_config.shown)


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
        return UnseparatedParser(parser_config, TaggedParser(replace(parser_config, reasoning=Reasoning.DONE)))
    return TaggedParser(parser_config)


TAGS = Strategy(_tagged, lambda _: str)


def _strategy(tool_format: ToolFormat) -> Strategy:
    """Returns how output of a format is parsed. The models of two formats mark all parts of their output."""
    if tool_format not in (ToolFormat.HARMONY, ToolFormat.MISTRAL_ARGS):
        return TAGS
    from frontend.output_parser.harmony import AnswerText, HarmonyParser, MistralParser, UserText

    if tool_format is ToolFormat.HARMONY:
        return Strategy(HarmonyParser, UserText)
    return Strategy(MistralParser, AnswerText)


def output_parser(parser_config: ParserConfig) -> OutputParser:
    """Creates the parser of a new output."""
    return _strategy(parser_config.tool_format).parser(parser_config)


def searched_text(parser_config: ParserConfig | None) -> Callable[[str], str]:
    """Returns a function that turns each piece of a new output into the text in which stop strings are searched."""
    return _strategy(parser_config.tool_format).searched(parser_config) if parser_config else str


# Collects the events of one output into its parts, for responses that are not streamed.


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


# Parses output that continues earlier text: parses both as one output, but yields only the events of the
# continuation.
#
# A tool call that began in the earlier text is yielded as a whole, with its name, as no client could use the end of
# its arguments alone.


class ContinuedParser:
    """Parses what follows the earlier texts, as an OutputParser. The first call that it yields has number 0."""

    def __init__(self, parser: OutputParser, before: Sequence[str]) -> None:
        """before: the earlier texts. `parser` has parsed nothing yet."""
        self._parser = parser
        self._complete = 0  # the number of complete calls in the earlier texts
        self._open: list[Event] = []  # the events of the call that the earlier texts leave incomplete
        for event in parser.feed("".join(before)):
            match event:
                case CallStart():
                    self._open = [event]
                case CallArguments():
                    self._open.append(event)
                case CallEnd(call):
                    self._open, self._complete = [], call + 1

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, is past it, or may still see it begin."""
        return self._parser.reasoning

    @property
    def called(self) -> bool:
        """Whether the whole output has a complete call and no incomplete call."""
        return self._parser.called

    def feed(self, text: str) -> list[Event]:
        return self._rest_of(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return self._rest_of(self._parser.finish())

    def _rest_of(self, events: list[Event]) -> list[Event]:
        events, self._open = [*self._open, *events], []
        return [self._renumbered(event) for event in events]

    def _renumbered(self, event: Event) -> Event:
        match event:
            case CallStart(call) | CallArguments(call) | CallEnd(call):
                return event._replace(call=call - self._complete)
            case _:
                return event


# Counts the tokens of reasoning while an output is parsed.


def feed_counting(parser: OutputParser, texts: Sequence[str], tokens: int) -> tuple[list[Event], int]:
    """Feeds the texts of the next tokens to a parser. Returns its events, and how many of the tokens are reasoning.

    texts: a text for each of `tokens` tokens, and perhaps, after the last token of the output, one more text that
        was left over from earlier tokens

    Tokens of the tags around reasoning count, too, except tokens that leave the opening tag incomplete. After
    reasoning, a call of this function costs one check.
    """
    if len(texts) == 1:
        before, events = parser.reasoning, parser.feed(texts[0])
        return events, tokens if before is Reasoning.OPEN or parser.reasoning is Reasoning.OPEN else 0
    events, thought = [], 0
    for position, text in enumerate(texts):
        before = parser.reasoning
        if before is Reasoning.DONE:
            return events + parser.feed("".join(texts[position:])), thought
        events += parser.feed(text)
        if (before is Reasoning.OPEN or parser.reasoning is Reasoning.OPEN) and position < tokens:
            thought += 1
    return events, thought


# Parses output for clients that want reasoning and its tags in the text. Looks for tool calls only after reasoning.


class UnseparatedParser:
    """Passes reasoning on as the model wrote it, and the rest of the output to another parser."""

    def __init__(self, parser_config: ParserConfig, body: TaggedParser) -> None:
        self._reasoning = parser_config.reasoning
        self._opening, self._closing = parser_config.tags
        self._body = body
        self._held = ""  # text that may still become an opening tag or a call
        self._tail = ""  # the last characters of reasoning: they may belong to the closing tag
        self._thought_calls = _thought_calls(parser_config)

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
        if self._thought_calls is not None:
            return self._feed_with_calls(text, self._thought_calls)
        return self._feed_thought(text)

    def _feed_thought(self, text: str) -> list[Event]:
        known = self._tail + text
        end = known.find(self._closing)
        if end < 0:
            self._tail = known[1 - len(self._closing) :]
            return [Text(text)] if text else []
        self._reasoning = Reasoning.DONE
        cut = end + len(self._closing) - len(self._tail)
        return [Text(text[:cut]), *self._body.feed(text[cut:])]

    def _feed_with_calls(self, text: str, calls: ThoughtCalls) -> list[Event]:
        """Passes reasoning on up to a call, or to what may still become one."""
        text, self._held = self._held + text, ""
        end = (self._tail + text).find(self._closing)
        at, is_call = calls.find(text if end < 0 else text[: max(0, end - len(self._tail))])
        if is_call:
            self._reasoning = Reasoning.DONE
            self._body.ends_thought(self._closing)
            said = text[:at].rstrip()
            return [*([Text(said)] if said else []), *self._body.feed(text[at:])]
        if end >= 0:
            return self._feed_thought(text)
        passed, self._held = text[: len(text[:at].rstrip())], text[len(text[:at].rstrip()) :]
        calls.passed(passed)
        return self._feed_thought(passed)

    def _decide(self, text: str) -> str:
        """Holds text back until it shows whether the output begins with reasoning. Returns "" until then, and then all
        the text."""
        self._held += text
        start = self._held.lstrip()
        if len(start) < len(self._opening) and self._opening.startswith(start):
            return ""
        self._reasoning = Reasoning.OPEN if start.startswith(self._opening) else Reasoning.DONE
        text, self._held = self._held, ""
        return text

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._reasoning is Reasoning.OPEN:
            return self._feed_thought(held) + self._body.finish()
        return self._body.feed(held) + self._body.finish()
