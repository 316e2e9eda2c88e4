"""Calls in other forms than a format's own, for every format: what a model writes, and what must be found."""

from dataclasses import replace
from typing import NamedTuple

from frontend.output_parser.drift import WITHOUT_DRIFT
from frontend.output_parser.model_format import ParserConfig, Reasoning, ToolFormat
from tests.frontend.output_parser.examples import EXAMPLES, SINGLE, config

ARGUMENTS = '{"city": "Ulm \\"a\\"", "days": [1, 2]}'
CALL = f'"name": "get_weather", "arguments": {ARGUMENTS}'
FORMATS = [one for one in (*EXAMPLES, *SINGLE) if one not in WITHOUT_DRIFT]
# the formats whose own first tag is <tool_call>, after which only their own form goes on
TOOL_CALL = (ToolFormat.HERMES, ToolFormat.QWEN_XML, ToolFormat.GLM)
TAGGED = {  # a call whose first tag is missing, in the formats whose arguments are not JSON
    ToolFormat.QWEN_XML: (
        '<function=get_weather>\n<parameter=city>\nUlm "a"\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>",
        "\n</tool_call>",
    ),
    ToolFormat.SEED: (
        '<function=get_weather><parameter=city>Ulm "a"</parameter><parameter=days>[1, 2]</parameter></function>',
        "\n</seed:tool_call>",
    ),
    ToolFormat.MINIMAX: (
        '<invoke name="get_weather">\n<parameter name="city">Ulm "a"</parameter>\n'
        '<parameter name="days">[1, 2]</parameter>\n</invoke>',
        "\n</minimax:tool_call>",
    ),
}  # fmt: skip


class Drifted(NamedTuple):
    """An output with one call of get_weather in it.

    form: a name for the table in the docs
    text: the output; before, after: the text around the call that the parser reports
    """

    form: str
    text: str
    before: str = ""
    after: str = ""


def drifted(tool_format: ToolFormat) -> list[Drifted]:
    """Returns outputs in all forms that count for a format."""
    function, end = TAGGED.get(tool_format, (f"<function=get_weather>{ARGUMENTS}</function>", ""))
    lines = CALL.replace(", ", ",\n  ", 1)
    found = [
        Drifted("fence", f"```json\n{{{CALL}}}\n```"),
        Drifted("fence", f"```json\n{{\n  {lines}\n}}\n```"),
        Drifted("fence", f"I look.\n\n```json\n{{{CALL}}}\n```\n\nDone.", "I look.", "\n\nDone."),
        Drifted("fence", f"```\n{{{CALL}}}\n```"),
        Drifted("fence", f"```json\n{{{CALL}}}"),
        Drifted("bare", f"{{{CALL}}}"),
        Drifted("bare", "{" + CALL.replace("arguments", "parameters") + "}"),
        Drifted("bare", f'\n{{"type": "function", {CALL}}}\n'),
        Drifted("wrapped", f"<tools>\n{{{CALL}}}\n</tools>"),
        Drifted("wrapped", f"<tools>{{{CALL}}}"),
        Drifted("wrapped", f"Hm.\n<function>{{{CALL}}}</function>", "Hm."),
        Drifted("wrapped", f"<function-call>\n{{{CALL}}}\n</tools>"),
        Drifted("function", function),
        Drifted("function", f"I look.\n{function}", "I look."),
    ]
    found += [Drifted("function", function + end)] * bool(end)
    if tool_format in TOOL_CALL:
        found.append(Drifted("opening left out", f"{{{CALL}}}\n</tool_call>"))
    else:
        found.append(Drifted("wrapped", f"<tool_call>\n{{{CALL}}}\n</tool_call>"))
    return found


def drifting(tool_format: ToolFormat, begins: Reasoning = Reasoning.DONE) -> ParserConfig:
    return replace(config(tool_format, begins), drifts=True)
