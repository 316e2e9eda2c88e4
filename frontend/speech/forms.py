"""How calls are written, as words in a row: what a reader looks for, and what a grammar makes a model write."""

from collections.abc import Mapping
from dataclasses import dataclass

from frontend.speech.style import Format

TAG, END_TAG = "<tool_call>", "</tool_call>"
MARKS: Mapping[Format, str] = {Format.LLAMA: "<|python_tag|>", Format.MISTRAL: "[TOOL_CALLS]"}  # may be special tokens
NAME = ""  # in a head: any string, the function's name

Head = tuple[str, ...]  # blanks may stand anywhere between


@dataclass(frozen=True, slots=True)
class Form:
    """`heads` stand before a call's arguments, `tail` behind them, as far as it is there."""

    heads: tuple[Head, ...]
    tail: Head
    tag: str = ""  # what calls in the midst of text begin with; without one they are all there is
    further: tuple[Head, ...] = ()  # before the arguments of a call that follows another, if that is written otherwise


HERMES: Head = (TAG, "{", '"name"', ":", NAME, ",", '"arguments"', ":")
MISTRAL: Head = ("{", '"name"', ":", NAME, ",", '"arguments"', ":")

FORMS: Mapping[Format, Form] = {
    Format.HERMES: Form((HERMES,), ("}", END_TAG), TAG, (HERMES,)),
    Format.LLAMA: Form(
        tuple(
            (*tag, "{", *kind, '"name"', ":", NAME, ",", key, ":")
            for tag in ((), (MARKS[Format.LLAMA],))
            for kind in ((), ('"type"', ":", '"function"', ","))
            for key in ('"parameters"', '"arguments"')
        ),
        ("}",),
    ),
    Format.MISTRAL: Form(
        (("[", *MISTRAL), (MARKS[Format.MISTRAL], "[", *MISTRAL)), ("}", "]"), further=((",", *MISTRAL),)
    ),
}
