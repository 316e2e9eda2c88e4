"""What turns a call's arguments, in the form of each format, into JSON as they arrive."""

from collections.abc import Mapping
from typing import Protocol

from frontend.output_parser.json_stream import JsonObjectScanner
from frontend.output_parser.literal_arguments import BARE, PYTHON, LiteralArguments
from frontend.output_parser.parameter_kinds import Kind
from frontend.output_parser.tagged_arguments import TaggedArguments
from frontend.output_parser.tool_syntax import Form, ToolCallSyntax


class ArgumentScanner(Protocol):
    """Scans the arguments of one call; `feed` returns the JSON that they certainly are so far.

    done: the arguments are complete
    broken: the text is not in the form
    rest: the text after the arguments, or what broke them
    held: JSON of text that was held back, if the output ends here
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
