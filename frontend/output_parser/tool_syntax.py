"""How calls are written in each format, as sequences of tokens: what the reader looks for and the grammar demands."""

from collections.abc import Mapping
from dataclasses import dataclass

from frontend.output_parser.formats import ToolFormat

TAG, END_TAG = "<tool_call>", "</tool_call>"
MARKS: Mapping[ToolFormat, str] = {
    ToolFormat.LLAMA: "<|python_tag|>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]",
}  # may be special tokens
NAME = ""  # in a head: any string, the function's name

Head = tuple[str, ...]  # blanks are allowed between any two


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """`heads` are what may stand before a call's arguments, `tail` what stands behind them, if it is not left out."""

    heads: tuple[Head, ...]
    tail: Head
    tag: str = ""  # what begins a call within text; without one, calls begin the answer
    further: tuple[Head, ...] = ()  # instead of `heads`, for calls after the first


HERMES: Head = (TAG, "{", '"name"', ":", NAME, ",", '"arguments"', ":")
MISTRAL: Head = ("{", '"name"', ":", NAME, ",", '"arguments"', ":")

FORMS: Mapping[ToolFormat, ToolCallSyntax] = {
    ToolFormat.HERMES: ToolCallSyntax((HERMES,), ("}", END_TAG), TAG, (HERMES,)),
    ToolFormat.LLAMA: ToolCallSyntax(
        tuple(
            (*tag, "{", *kind, '"name"', ":", NAME, ",", key, ":")
            for tag in ((), (MARKS[ToolFormat.LLAMA],))
            for kind in ((), ('"type"', ":", '"function"', ","))
            for key in ('"parameters"', '"arguments"')
        ),
        ("}",),
    ),
    ToolFormat.MISTRAL: ToolCallSyntax(
        (("[", *MISTRAL), (MARKS[ToolFormat.MISTRAL], "[", *MISTRAL)), ("}", "]"), further=((",", *MISTRAL),)
    ),
}
