"""Describes tools in the system message, in the form that Hermes models read, for templates that cannot show tools."""

import json
from collections.abc import Iterable
from typing import Any

from frontend.output_parser.calls.tool_syntax import SYNTAX
from frontend.output_parser.formats import ToolFormat
from frontend.output_parser.tool_choice import Function

INSTRUCTIONS = """\
# Tools

You can call these functions, each of which is described by a line of JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments, as a JSON object, in exactly this form:
{example}
Several calls follow each other. You then get the result of each one, and answer with the help of it."""


def json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def instructions(functions: Iterable[Function], tool_format: ToolFormat) -> str:
    """Returns the text that tells a model which functions it may call, and how.

    tool_format: a format whose arguments are JSON
    """
    tools = "\n".join(json_text(one.definition["function"]) for one in functions)
    return INSTRUCTIONS.format(tools=tools, example=_example(tool_format))


def _example(tool_format: ToolFormat) -> str:
    syntax = SYNTAX[tool_format]
    if tool_format is ToolFormat.HERMES:
        return call_text("NAME", "ARGUMENTS")
    head = "".join(f"\n{word}\n" if word == "```json" else word for word in syntax.heads[0].split())
    tail = "".join(f"\n{word}" if word == "```" else word for word in syntax.tail.split())
    return f"{syntax.opening}{head}ARGUMENTS{tail}{syntax.closing}"


def call_text(name: str, arguments: Any) -> str:
    """Returns a call in Hermes' format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json_text(arguments)}}}\n</tool_call>'


def result_text(content: str) -> str:
    """Returns the result of a call in Hermes' format."""
    return f"<tool_response>\n{content}\n</tool_response>"
