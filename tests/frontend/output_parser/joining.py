"""Helpers for tests of parsers: join adjacent events, and check the rules for all sequences of events."""

import json
from collections.abc import Callable, Iterable

from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, ReasoningText, Text
from frontend.output_parser.model_format import ParserConfig
from frontend.output_parser.parser import output_parser

NAMES = frozenset({"add", "get_weather"})


def joined(events: Iterable[Event]) -> list[Event]:
    """Merges adjacent events of the same kind."""
    whole: list[Event] = []
    for event in events:
        match whole[-1:], event:
            case [Text(before)], Text(text):
                whole[-1] = Text(before + text)
            case [ReasoningText(before)], ReasoningText(text):
                whole[-1] = ReasoningText(before + text)
            case [CallArguments(index, before)], CallArguments(_, text):
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(event)
    return whole


def events_of(parser_config: ParserConfig, *pieces: str) -> list[Event]:
    """Parses an output that arrives in pieces, and joins its events."""
    parser = output_parser(parser_config)
    return joined([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def called(index: int, name: str, arguments: str) -> list[Event]:
    """Returns the events of a complete call."""
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


def cut(text: str, sizes: Iterable[int]) -> list[str]:
    """Cuts a text into pieces of these sizes; the rest is the last piece."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def check_order(events: list[Event], check_text: Callable[[str], None] = lambda _: None) -> None:
    """Asserts that indexes count up, arguments follow their start, an end follows valid JSON, and no event is empty."""
    begun, arguments = 0, ""
    for event in events:
        match event:
            case CallStart(index, name):
                assert index == begun and name in NAMES
                begun, arguments = begun + 1, ""
            case CallArguments(index, fragment):
                assert index == begun - 1 and fragment
                arguments += fragment
            case CallEnd(index):
                assert index == begun - 1 and isinstance(json.loads(arguments), dict)
            case Text(text) | ReasoningText(text):
                assert text
                check_text(text)
