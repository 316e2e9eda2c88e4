"""How each tool format writes a call, as rows of data: the parser looks for this syntax, and the grammar enforces it.

The rows follow the models' own chat templates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product

from frontend.output_parser import marks
from frontend.output_parser.formats import Tags, ToolFormat


class Form(Enum):
    """How the arguments of a call are written."""

    JSON = auto()  # {"city": "Ulm"}
    TAGS = auto()  # <parameter=city>Ulm</parameter>, see `ParameterTags`
    PYTHON = auto()  # (city="Ulm")
    BARE = auto()  # {city:<|"|>Ulm<|"|>}


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """How a parameter is written between tags.

    key: the tags before and after a parameter's name
    value: the tags before and after its value; the first of them may be empty
    end: the tag after all arguments
    lines: whether a value stands on lines of its own; the line breaks around it are not a part of the value
    """

    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    lines: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """How calls are written around their arguments.

    Each text is a sequence of words: white space may stand where the text has a space, and nowhere else. NAME is the
    function's name, INDEX a number.

    heads: the alternatives for what precedes the arguments; the first is the usual one
    tail: what follows the arguments; a model may leave it out
    opening, between, closing: what stands before the first call, between two calls, and after the last call; a model
        may leave out `closing`
    inline: whether calls may follow text, as they begin with a tag; False: the whole output is calls
    mark: a special token before the opening that some vocabularies have; a model may leave it out
    needs_mark: whether an output that must call begins with the mark
    single: whether an output has one call at most
    form: how the arguments are written
    tags: how parameters are written in the form TAGS
    """

    heads: tuple[str, ...]
    tail: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    inline: bool = True
    mark: str = ""
    needs_mark: bool = False
    single: bool = False
    form: Form = Form.JSON
    tags: ParameterTags | None = None

    @property
    def tag(self) -> str:
        """The word that begins a call within text; empty if calls stand at the beginning of the output only."""
        return f"{self.opening} {self.heads[0]}".split()[0].removesuffix("NAME") if self.inline else ""

    @property
    def words(self) -> list[str]:
        """All words of the syntax. Some of them may be special tokens of the vocabulary."""
        texts = (self.mark, self.opening, *self.heads, self.tail, self.between, self.closing)
        inner = (*self.tags.key, *self.tags.value, self.tags.end) if self.tags else ()
        quotes = (BARE_QUOTE,) if self.form is Form.BARE else ()
        return [word for text in (*texts, *inner) for word in text.split()] + list(quotes)


BARE_QUOTE = '<|"|>'
_JSON_HEAD = '{ "name" : "NAME" , "arguments" :'
_FUNCTION = ParameterTags(("<parameter=", ">"), ("", "</parameter>"), "</function>")

SYNTAX: Mapping[ToolFormat, ToolCallSyntax] = {
    ToolFormat.HERMES: ToolCallSyntax((f"<tool_call> {_JSON_HEAD}",), "} </tool_call>"),
    ToolFormat.LLAMA: ToolCallSyntax(
        tuple(
            f'{{ {kind} "name" : "NAME" , {key} :'
            for key, kind in product(('"parameters"', '"arguments"'), ("", '"type" : "function" ,'))
        ),
        "}",
        inline=False,
        mark="<|python_tag|>",
        single=True,
    ),
    ToolFormat.MISTRAL: ToolCallSyntax(
        (_JSON_HEAD,), "}", "[", ",", "]", inline=False, mark="[TOOL_CALLS]", needs_mark=True
    ),
    ToolFormat.GRANITE: ToolCallSyntax((_JSON_HEAD,), "}", "<|tool_call|> [", ",", "]"),
    ToolFormat.NEMOTRON: ToolCallSyntax((_JSON_HEAD,), "}", "<TOOLCALL> [", ",", "] </TOOLCALL>"),
    ToolFormat.DEEPSEEK_V3: ToolCallSyntax(
        ("<｜tool▁call▁begin｜> function <｜tool▁sep｜> NAME ```json",), "``` <｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>",
    ),
    ToolFormat.DEEPSEEK_V31: ToolCallSyntax(
        ("<｜tool▁call▁begin｜> NAME <｜tool▁sep｜>",), "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", closing="<｜tool▁calls▁end｜>",
    ),
    ToolFormat.KIMI: ToolCallSyntax(
        ("<|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|>",), "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
    ),
    ToolFormat.GLM4: ToolCallSyntax(("NAME",), inline=False, single=True),
    ToolFormat.GLM: ToolCallSyntax(
        ("<tool_call> NAME",), form=Form.TAGS,
        tags=ParameterTags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>"),
    ),
    ToolFormat.QWEN_XML: ToolCallSyntax(
        ("<tool_call> <function=NAME>",), "</tool_call>", form=Form.TAGS,
        tags=ParameterTags(_FUNCTION.key, _FUNCTION.value, _FUNCTION.end, lines=True),
    ),
    ToolFormat.SEED: ToolCallSyntax(
        ("<seed:tool_call> <function=NAME>",), "</seed:tool_call>", form=Form.TAGS, tags=_FUNCTION
    ),
    ToolFormat.MINIMAX: ToolCallSyntax(
        ('<invoke name="NAME">',), "", "<minimax:tool_call>", closing="</minimax:tool_call>", form=Form.TAGS,
        tags=ParameterTags(('<parameter name="', '">'), ("", "</parameter>"), "</invoke>"),
    ),
    ToolFormat.PYTHONIC: ToolCallSyntax(
        ("NAME",), "", "[", ",", "]", inline=False, mark="<|python_start|>", form=Form.PYTHON
    ),
    ToolFormat.LFM2: ToolCallSyntax(
        ("NAME",), "", "<|tool_call_start|> [", ",", "] <|tool_call_end|>", form=Form.PYTHON
    ),
    ToolFormat.OLMO3: ToolCallSyntax(
        ("NAME",), "", "<function_calls>", closing="</function_calls>", form=Form.PYTHON
    ),
    ToolFormat.GEMMA3: ToolCallSyntax(("NAME",), "", "```tool_code", closing="```", form=Form.PYTHON),
    ToolFormat.GEMMA4: ToolCallSyntax(("<|tool_call> call:NAME",), "<tool_call|>", form=Form.BARE),
}  # fmt: skip


def specials_of(tool_format: ToolFormat, tags: Tags) -> Iterable[str]:
    """Returns the words of a format, and of the tags around reasoning, that may be special tokens of a vocabulary."""
    match tool_format:
        case ToolFormat.HARMONY:
            return marks.HARMONY
        case ToolFormat.MISTRAL_ARGS:
            return marks.MISTRAL_ARGS
    words = SYNTAX[tool_format].words if tool_format in SYNTAX else []
    return [*words, *tags, *[tag[: tag.find(">") + 1] for tag in tags]]
