"""How each tool format writes a call, as rows of data: the parser looks for this syntax, and the grammar enforces it.

The rows follow the models' own chat templates.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from frontend.output_parser import model_format
from frontend.output_parser.model_format import Function, Tags, ToolFormat


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
            return model_format.HARMONY
        case ToolFormat.MISTRAL_ARGS:
            return model_format.MISTRAL_ARGS
    words = SYNTAX[tool_format].words if tool_format in SYNTAX else []
    return [*words, *tags, *[tag[: tag.find(">") + 1] for tag in tags]]


# Matches the beginning of a call, whose text may still be incomplete.

BLANKS = re.compile(r"\s*")
NAME_CHARS = re.compile(r"[\w.-]*")
DIGITS = re.compile(r"[0-9]*")
OPENERS = {Form.JSON: ("{",), Form.BARE: ("{",), Form.PYTHON: ("(",)}


class Slot(Enum):
    """A variable part between the fixed words of a prefix."""

    BLANKS = auto()
    NAME = auto()
    INDEX = auto()


Prefix = tuple[str | Slot, ...]


class PrefixMatch(NamedTuple):
    """A call's prefix in a text.

    name: the function's name; empty while the name is incomplete
    end: where the arguments begin; None while the text is too short to decide
    """

    name: str = ""
    end: int | None = None


class Prefixes(NamedTuple):
    """The prefixes that may precede a call's arguments.

    first: the prefixes of the first call
    later: the prefixes of a call that follows another call
    ahead: the texts with which the arguments may begin
    """

    first: tuple[Prefix, ...]
    later: tuple[Prefix, ...]
    ahead: tuple[str, ...]


@lru_cache
def prefixes_of(syntax: ToolCallSyntax) -> Prefixes:
    openings = (syntax.opening, f"{syntax.mark} {syntax.opening}") if syntax.mark else (syntax.opening,)
    ahead = (syntax.tags.key[0], syntax.tags.end) if syntax.tags else OPENERS[syntax.form]
    return Prefixes(
        tuple(compiled(f"{opening} {head}") for opening in openings for head in syntax.heads),
        tuple(compiled(f"{syntax.between} {head}") for head in syntax.heads),
        ahead,
    )


def compiled(text: str) -> Prefix:
    """Returns the atoms of a sequence of words."""
    atoms: list[str | Slot] = []
    for word in text.split():
        parts = re.split("(NAME|INDEX)", word)
        atoms += [Slot.BLANKS, *[Slot[part] if part in ("NAME", "INDEX") else part for part in parts if part]]
    return tuple(atoms)


def find_prefix(
    text: str, prefixes: Iterable[Prefix], ahead: tuple[str, ...], names: Collection[str] | None = None
) -> PrefixMatch | None:
    """Returns the match of the first prefix that `text` begins with.

    If there is none, returns an incomplete match of the first prefix that `text` may still become, or else None.

    names: the names that a prefix may have; None: any
    """
    undecided = None
    for prefix in prefixes:
        found = _match(text, prefix, ahead, names)
        if found is not None and found.end is not None:
            return found
        undecided = undecided or found
    return undecided


def _match(text: str, prefix: Prefix, ahead: tuple[str, ...], names: Collection[str] | None) -> PrefixMatch | None:
    at, name = 0, ""
    for atom in prefix:
        if atom is Slot.BLANKS:
            at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        elif isinstance(atom, Slot):
            end = (NAME_CHARS if atom is Slot.NAME else DIGITS).match(text, at).end()  # type: ignore[union-attr]
            if names is not None and atom is Slot.NAME and not _may_be(text[at:end], end == len(text), names):
                return None
            if end in (at, len(text)):
                return PrefixMatch(name) if end == len(text) else None
            name, at = text[at:end] if atom is Slot.NAME else name, end
        elif text.startswith(atom, at):
            at += len(atom)
        else:
            return PrefixMatch(name) if atom.startswith(text[at:]) else None
    at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
    if any(text.startswith(word, at) for word in ahead):
        return PrefixMatch(name, at)
    return PrefixMatch(name) if any(word.startswith(text[at:]) for word in ahead) else None


def _may_be(name: str, partial: bool, names: Collection[str]) -> bool:
    return any(one.startswith(name) for one in names) if partial else name in names


def partial_tag(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that may become `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


# Describes tools in the system message, in the form that Hermes models read, for templates that cannot show tools.

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
