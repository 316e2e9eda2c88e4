"""Turns a call's arguments into JSON as they arrive. Each format writes arguments in one of a few forms."""

from collections.abc import Mapping
from typing import Protocol

from frontend.output_parser.calls.json_stream import JsonObjectScanner
from frontend.output_parser.calls.literal_arguments import BARE, PYTHON, LiteralArguments
from frontend.output_parser.calls.tagged_arguments import TaggedArguments
from frontend.output_parser.calls.tool_syntax import Form, ToolCallSyntax
from frontend.output_parser.parameter_kinds import Kind


class ArgumentScanner(Protocol):
    """Scans the arguments of one call; `feed` returns the JSON of the part that is certain.

    done: whether the arguments are complete
    broken: whether the text does not have the form
    rest: the text after the arguments, or from the place where they broke
    held: the JSON to add for text that was held back, if the output ends here
    """

    @property
    def done(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def rest(self) -> str: ...
    @property
    def held(self) -> str: ...
    def feed(self, text: str) -> str: ...


def scanner_of(syntax: ToolCallSyntax, kinds: Mapping[str, Mapping[str, Kind]], function: str) -> ArgumentScanner:
    """Creates the scanner of a call to `function`, whose parameters have these kinds."""
    match syntax.form:
        case Form.PYTHON:
            return LiteralArguments(PYTHON)
        case Form.BARE:
            return LiteralArguments(BARE)
        case Form.TAGS if syntax.tags is not None:
            return TaggedArguments(syntax.tags, kinds.get(function, {}))
    return JsonObjectScanner()
