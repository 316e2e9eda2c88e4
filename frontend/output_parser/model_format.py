"""Knows how a model writes reasoning and tool calls (`ModelFormat`), and what to look for in one output
(`ParserConfig`).

The source of the chat template shows the format; `--tool-format` and `--reasoning-format` override it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any

from frontend.errors import Unprocessable

# Shows parsers the special tokens that they need. Detokenized text omits special tokens, so stand-ins replace them.
#
# A stand-in is a lone surrogate, to which no sequence of bytes decodes, so no model can spell one letter by letter.

START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = map(chr, range(0xDC81, 0xDC88))
HARMONY: Mapping[str, str] = {
    "<|start|>": START,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
TOOL_CALLS, CALL_ID, ARGS, THINK_MARK, THOUGHT_MARK = map(chr, range(0xDC91, 0xDC96))
MISTRAL_ARGS: Mapping[str, str] = {
    "[TOOL_CALLS]": TOOL_CALLS,
    "[CALL_ID]": CALL_ID,
    "[ARGS]": ARGS,
    "[THINK]": THINK_MARK,
    "[/THINK]": THOUGHT_MARK,
}
BLANK = "\udc80"  # replaces hidden characters; it stands for no token, and no stop string contains it
_SPELLINGS = {ord(mark): spelling for each in (HARMONY, MISTRAL_ARGS) for spelling, mark in each.items()}


def spelled(text: str) -> str:
    """Returns `text` with its stand-ins written out as the special tokens' spellings."""
    return text.translate(_SPELLINGS)


# Finds out from a JSON schema which kinds of values a parameter may have.
#
# Where a format writes a string without quotes, only the schema tells a text from a number.

MAX_DEPTH = 16  # the depth to which references and alternatives are followed


class Kind(Enum):
    """How the text of a value is to be understood."""

    TEXT = auto()  # the text is the string itself
    JSON = auto()  # the text is JSON of a type other than string
    EITHER = auto()  # like JSON if the text is JSON of such a type, else like TEXT


def kinds_of(schema: Mapping[str, Any]) -> dict[str, Kind]:
    """Returns the kind of each named parameter of a function; other parameters are TEXT."""
    properties = schema.get("properties")
    return {name: kind_of(one, schema) for name, one in properties.items()} if isinstance(properties, dict) else {}


def kind_of(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Returns the kind of a value. A schema that says nothing of the type means a string."""
    types = types_of(schema, root)
    if not types or types == {"string"}:
        return Kind.TEXT
    return Kind.EITHER if "string" in types else Kind.JSON


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the JSON types that a value may have, as far as the schema says."""
    return frozenset(_types(schema, root, MAX_DEPTH))


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema that a reference within `root` leads to; an empty schema if the reference leads nowhere."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _at(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _at(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root if reference.startswith("#") else None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (one for one in named if isinstance(one, str))
    elif isinstance(schema.get("enum"), list):
        yield from map(_type_of, schema["enum"])
    elif "const" in schema:
        yield _type_of(schema["const"])
    elif "properties" in schema:
        yield "object"
    elif "items" in schema:
        yield "array"
    elif depth:
        for key in ("anyOf", "oneOf", "allOf"):
            alternatives = schema.get(key)
            for one in alternatives if isinstance(alternatives, list) else ():
                yield from _types(one, root, depth - 1)


def _type_of(value: Any) -> str:
    return {str: "string", bool: "boolean", type(None): "null"}.get(type(value), "other")


def as_json(text: str, kind: Kind) -> str:
    """Returns the JSON of a value, from its whole text. Text of the kind JSON that is no JSON becomes a string."""
    if kind is not Kind.TEXT:
        stripped = text.strip()
        try:
            value = json.loads(PYTHON_WORDS.get(stripped, stripped), parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = text
        if not isinstance(value, str):
            return PYTHON_WORDS.get(stripped, stripped)
        text = value if kind is Kind.JSON else text
    return json.dumps(text, ensure_ascii=False)


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _refuse(word: str) -> Any:
    raise ValueError(word)


# Says which functions the output may or must call, independent of the API format.


class Mode(StrEnum):
    """Whether functions may or must be called."""

    NONE = "none"  # the prompt shows no functions, and none may be called
    AUTO = "auto"
    REQUIRED = "required"


INPUT = "input"  # the parameter of a function that stands for a custom tool


@dataclass(frozen=True, slots=True)
class Custom:
    """What a custom tool, whose input is a text, has besides its name.

    syntax: of the grammar that the input keeps to: "regex", "lark", or "" if there is none
    definition: the grammar
    param: the request field that holds it
    format: the format as the client sent it
    part: how the grammar of an output calls the definition, if it is enforced as a grammar of its own
    """

    syntax: str = ""
    definition: str = ""
    param: str = ""
    format: Any = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the client offers.

    parameters: a JSON schema of an object
    param: the request field that holds `parameters`
    definition: the description that a chat template reads
    custom: set if the function stands for a custom tool; its only parameter is then `INPUT`, a text
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str
    definition: dict[str, Any]
    custom: Custom | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The offered functions, and which of them may be called.

    functions: all functions that the request offers
    callable_names: the names of the functions that may be called, unless `mode` forbids calls
    parallel: whether the output may have several calls
    """

    functions: tuple[Function, ...] = ()
    mode: Mode = Mode.AUTO
    callable_names: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def shown_functions(self) -> tuple[Function, ...]:
        """The functions that the prompt shows."""
        return () if self.mode is Mode.NONE else self.functions

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the functions that stand for custom tools."""
        return frozenset([one.name for one in self.functions if one.custom is not None])

    @property
    def callable_functions(self) -> list[Function]:
        if self.mode is Mode.NONE:
            return []
        return [function for function in self.functions if function.name in self.callable_names]


def check_specials(needed: Iterable[str], specials: Collection[str], tool_choice: ToolChoice) -> None:
    """Raises Unprocessable if a format's mark is not among the model's special tokens."""
    if lacking := [spelling for spelling in needed if spelling not in specials]:
        param = "tools" if tool_choice.functions else "response_format"
        raise Unprocessable(
            f"`{param}` cannot be enforced: this model's tokenizer has no special token {lacking[0]}",
            param=param, code="unsupported_field",
        )  # fmt: skip


class ToolFormat(StrEnum):
    """How a model writes a call."""

    NONE = "none"
    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, also used by Qwen
    LLAMA = "llama"  # {"name": …, "parameters": {…}} and nothing else
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] and nothing else
    MISTRAL_ARGS = "mistral-args"  # [TOOL_CALLS]NAME[ARGS]{…}, repeated
    HARMONY = "harmony"  # <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    QWEN_XML = "qwen-xml"  # <tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>
    SEED = "seed"  # as QWEN_XML, but in <seed:tool_call>
    GLM = "glm"  # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value></tool_call>
    GLM4 = "glm4"  # NAME, {…} on the next line, and nothing else
    MINIMAX = "minimax"  # <minimax:tool_call><invoke name="NAME"><parameter name="KEY">…</parameter></invoke>…
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {…} ```…
    DEEPSEEK_V3 = "deepseek-v3"
    # <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…
    DEEPSEEK_V31 = "deepseek-v31"
    KIMI = "kimi"  # <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…
    GRANITE = "granite"  # <|tool_call|>[{"name": …, "arguments": {…}}, …]
    NEMOTRON = "nemotron"  # <TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>
    PYTHONIC = "pythonic"  # [NAME(key="…", …), …] and nothing else
    LFM2 = "lfm2"  # <|tool_call_start|>[NAME(key="…", …), …]<|tool_call_end|>
    OLMO3 = "olmo3"  # <function_calls>NAME(key="…", …)</function_calls>, one call a line
    GEMMA3 = "gemma3"  # as OLMO3, but in a block of code: ```tool_code
    GEMMA4 = "gemma4"  # <|tool_call>call:NAME{key:<|"|>…<|"|>, …}<tool_call|>


# Words by which a chat template shows the format of its calls. The first row whose words are all there decides.
TEMPLATE_WORDS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (ToolFormat.HARMONY, ("<|channel|>",)),  # harmony is the format of all output, not of calls only
    (ToolFormat.SEED, ("<seed:tool_call>", "<function=")),
    (ToolFormat.MINIMAX, ("<minimax:tool_call>", "<invoke name=")),
    (ToolFormat.QWEN_XML, ("<tool_call>", "<function=", "<parameter=")),
    (ToolFormat.GLM, ("<tool_call>", "<arg_key>", "<arg_value>")),
    (ToolFormat.GEMMA4, ("<|tool_call>call:",)),
    (ToolFormat.NEMOTRON, ("<TOOLCALL>",)),
    (ToolFormat.HERMES, ("<tool_call>",)),
    (ToolFormat.DEEPSEEK_V3, ("<｜tool▁call▁begin｜>", "```json")),
    (ToolFormat.DEEPSEEK_V31, ("<｜tool▁call▁begin｜>",)),
    (ToolFormat.KIMI, ("<|tool_calls_section_begin|>",)),
    (ToolFormat.LFM2, ("<|tool_call_start|>",)),
    (ToolFormat.LFM2, ("<|tool_list_start|>",)),
    (ToolFormat.GRANITE, ("<|tool_call|>",)),
    (ToolFormat.OLMO3, ("<function_calls>",)),
    (ToolFormat.GEMMA3, ("```tool_code",)),
    (ToolFormat.MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (ToolFormat.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolFormat.LLAMA, ("<|python_tag|>", '"parameters"')),
    (ToolFormat.LLAMA, ("ipython", '"parameters"')),
    (ToolFormat.PYTHONIC, ("[func_name1(",)),
    (ToolFormat.GLM4, ("<|observation|>", '"metadata"')),
)
# formats whose templates render calls, but no list of tools
DESCRIBED = frozenset({ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31})
KNOWN_WITHOUT_TOOLS = DESCRIBED | {ToolFormat.HARMONY, ToolFormat.MISTRAL_ARGS}
ARGUMENTS_AS_TEXT = re.compile(r"""arguments(['"]\])?\s*\+""")  # matches a template with `… + call.arguments + …`
# Matches a template that reads the variable `thinking` (DeepSeek V3.1), but not one that reads `message.thinking`.
ASKS_FOR_THINKING = re.compile(r"(?<![.\w])thinking is (not )?defined")
# The special tokens that a format cannot be parsed without, and the stand-in for each of them.
MARKS: Mapping[ToolFormat, Mapping[str, str]] = {
    ToolFormat.HARMONY: HARMONY,
    ToolFormat.MISTRAL_ARGS: MISTRAL_ARGS,
}
Tags = tuple[str, str]  # the texts that open and close reasoning
THINK: Tags = ("<think>", "</think>")
# A model's tags are the first pair of which its template contains at least one tag.
TAGS: tuple[Tags, ...] = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    THINK,
)
# A client's reasoning effort → the nearest effort that the format knows. Gpt-oss always reasons, so it has no "none".
DEGREES: Mapping[ToolFormat, Mapping[str, str]] = {
    ToolFormat.HARMONY: {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
}


class Reasoning(StrEnum):
    """Whether a place in the output lies within reasoning."""

    DONE = "done"  # reasoning has ended or is off: an opening tag would be text. In harmony: within the answer
    UNDECIDED = "undecided"  # the output may open its reasoning here. In harmony: a message begins
    OPEN = "open"  # reasoning has begun, in the prompt or in the output


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The properties of a model that the source of its chat template shows."""

    tool_format: ToolFormat = ToolFormat.NONE
    shows_tools: bool = False  # whether the template writes tools into the prompt
    has_reasoning: bool = False
    thinking_switch: str = ""  # the variable of the template that turns thinking on or off; "" if it has none
    has_reasoning_effort: bool = False  # whether the template reads the variable `reasoning_effort`
    tags: Tags = THINK
    tools_as_text: bool = False  # whether a system message describes tools, which the template cannot show
    calls_as_text: bool = False  # whether messages' texts contain calls and results, which the template cannot show
    arguments_as_text: bool = False  # whether the template expects a call's arguments as a string of JSON
    drifts: bool = False  # whether calls in other forms than the format's count, see frontend/output_parser/drift.py

    @classmethod
    def of(
        cls,
        templates: Mapping[str, str],
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        render: Callable[[list[dict[str, Any]]], str] | None = None,
    ) -> "ModelFormat":
        """Returns the properties that the sources of templates show.

        render: renders messages with these templates. It is called once if the templates write calls, but name no
            `tools`: only the prompt of an example shows whether they write results, too. None: they do not
        """
        source = "\n".join(templates.values())
        shows_tools = "tools" in source
        detected = _tool_format(source) if tool_format == "auto" else ToolFormat(tool_format)
        needs_text = detected is ToolFormat.NONE or not (shows_tools or detected in KNOWN_WITHOUT_TOOLS)
        as_text = tool_format in ("auto", ToolFormat.HERMES) and needs_text
        detected = ToolFormat.HERMES if as_text else detected
        text_arguments = ARGUMENTS_AS_TEXT.search(source) is not None
        shows_calls = (
            as_text and "tool_calls" in source and not shows_tools
            and render is not None and _shows_calls(render, text_arguments)
        )  # fmt: skip
        tags = next((tags for tags in TAGS if any(tag in source for tag in tags)), None)
        thinks = detected is ToolFormat.HARMONY or tags is not None
        return cls(
            tool_format=detected,
            shows_tools=shows_tools,
            has_reasoning=thinks if reasoning_format == "auto" else reasoning_format == "think",
            thinking_switch="enable_thinking" if "enable_thinking" in source else _plain_switch(source),
            has_reasoning_effort="reasoning_effort" in source,
            tags=tags or THINK,
            tools_as_text=as_text or (not shows_tools and detected in DESCRIBED),
            calls_as_text=as_text and not shows_calls,
            arguments_as_text=text_arguments,
        )

    def output_begins(self, prompt: str, continued: str = "") -> Reasoning:
        """Returns whether an output begins inside reasoning, after reasoning, or where reasoning may open.

        prompt: the rendered prompt
        continued: the beginning of the answer that the prompt ends with, if the output continues an answer
        """
        if self.tool_format is ToolFormat.HARMONY:
            return _open_message(prompt)
        if not self.has_reasoning:
            return Reasoning.DONE
        opening, closing = self.tags
        if continued:
            return Reasoning.OPEN if continued.rfind(opening) > continued.rfind(closing) else Reasoning.DONE
        tail = prompt[-64:].rstrip()
        if tail.endswith(opening):
            return Reasoning.OPEN
        return Reasoning.DONE if tail.endswith(closing) else Reasoning.UNDECIDED

    def parser_config(
        self,
        begins: Reasoning,
        functions: Iterable[Function],
        *,
        must_call: bool = False,
        may_drift: bool = False,
        specials: Collection[str] = (),
    ) -> "ParserConfig | None":
        """Returns how to parse an output; None if all of the output is text.

        functions: the functions that the output may call
        must_call: whether, after reasoning, the output consists only of calls
        may_drift: whether the output's text is free, so that calls may have other forms than the format's
        specials: special tokens of the model's vocabulary that are words of the format or tags around reasoning
        """
        callable_functions = tuple(functions)
        if begins is Reasoning.DONE and not callable_functions and self.tool_format not in MARKS:
            return None
        return ParserConfig(
            begins,
            self.tool_format,
            frozenset(one.name for one in callable_functions),
            reasoning_is_text=not self.has_reasoning,
            tags=self.tags,
            must_call=must_call and bool(callable_functions),
            drifts=self.drifts and may_drift and bool(callable_functions),
            kinds={one.name: kinds_of(one.parameters) for one in callable_functions},
            shown=frozenset(specials),
        )

    def degree(self, effort: str) -> str:
        """Returns the reasoning effort that the model knows and that is nearest to a client's `effort`."""
        return DEGREES.get(self.tool_format, {}).get(effort, effort)


def _shows_calls(render: Callable[[list[dict[str, Any]]], str], text_arguments: bool) -> bool:
    """Says whether a template shows two calls of one message, and each result in a message of its own."""
    facts = [(f"made0call{number}", f"function_{number}", f"word_{number}", f"result_{number}") for number in (1, 2)]
    calls = []
    for id, name, word, _ in facts:
        arguments = {"key": word}
        given = json.dumps(arguments) if text_arguments else arguments
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": given}})
    results = [{"role": "tool", "name": name, "tool_call_id": id, "content": result} for id, name, _, result in facts]
    end = [{"role": "assistant", "content": "said_3"}, {"role": "user", "content": "asked_4"}]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "asked_0"}]
    try:
        text = render([*asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results, *end])
    except Exception:  # a template is a program: messages that it does not expect can make it raise anything
        return False
    words = ["asked_0", *(one for _, name, word, _ in facts for one in (name, word)), *(one[3] for one in facts)]
    places = [text.find(one) for one in (*words, "said_3", "asked_4")]
    return -1 not in places and places == sorted(places)


def _plain_switch(source: str) -> str:
    return "thinking" if ASKS_FOR_THINKING.search(source) else ""


def _open_message(prompt: str) -> Reasoning:
    """Returns OPEN if a harmony prompt ends inside a message of reasoning, DONE inside any other, else UNDECIDED."""
    last = prompt[prompt.rfind("<|start|>") :]
    header, message, _ = last.partition("<|message|>")
    if not message or last.endswith(("<|end|>", "<|return|>", "<|call|>")):
        return Reasoning.UNDECIDED
    return Reasoning.OPEN if "<|channel|>analysis" in header else Reasoning.DONE


def _tool_format(source: str) -> ToolFormat:
    return next((one for one, words in TEMPLATE_WORDS if all(word in source for word in words)), ToolFormat.NONE)


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """What to look for in one output.

    reasoning: whether the output begins inside reasoning, after reasoning, or where reasoning may open
    tool_format: how the output writes calls
    function_names: the functions that the output may call
    reasoning_is_text: whether reasoning stays in the text
    tags: the texts that open and close reasoning
    must_call: whether, after reasoning, the output consists only of calls
    drifts: whether calls in other forms than the format's count
    kinds: the kinds of values that each function's parameters may have
    shown: special tokens whose spelling the parser must see
    reasoning_in_pieces: whether a stream sends reasoning as it is generated; False: it sends whole blocks of reasoning
    """

    reasoning: Reasoning = Reasoning.DONE
    tool_format: ToolFormat = ToolFormat.NONE
    function_names: frozenset[str] = field(default_factory=frozenset)
    reasoning_is_text: bool = False
    tags: Tags = THINK
    must_call: bool = False
    drifts: bool = False
    kinds: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict, hash=False)
    shown: frozenset[str] = field(default_factory=frozenset)
    reasoning_in_pieces: bool = True

    @property
    def marks(self) -> Mapping[str, str]:
        """The special tokens that the parser must see, each with its stand-in in the text that the parser gets."""
        return MARKS.get(self.tool_format) or {spelling: spelling for spelling in self.shown}


def with_reasoning(parser_config: ParserConfig | None, separate: bool, in_pieces: bool) -> ParserConfig | None:
    """Returns the config with these choices of a request.

    separate: whether reasoning is in a field of its own; False: it is part of the text
    in_pieces: see `reasoning_in_pieces`
    """
    if parser_config is None or (separate and in_pieces):
        return parser_config
    is_text = parser_config.reasoning_is_text or not separate
    return replace(parser_config, reasoning_is_text=is_text, reasoning_in_pieces=in_pieces)


# Knows, for each format, the marks around reasoning, and the text that ends reasoning when its budget is used up.


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts that stand around reasoning. Each entry is encoded by itself, so marks become single tokens."""

    opening: tuple[str, ...]
    closing: str  # the text that ends reasoning: a single token
    forced: tuple[str, ...]  # `closing`, and the text that leads on to the answer
    anywhere: bool = False  # whether reasoning may open later than at the beginning of an output
    forbidden: tuple[str, ...] = ()  # marks that would reopen reasoning: not allowed once the budget is used up


_HARMONY = ReasoningMarks(
    opening=("<|channel|>", "analysis", "<|message|>"),
    closing="<|end|>",
    forced=("<|end|>", "<|start|>", "assistant", "<|channel|>"),
    anywhere=True,
    forbidden=("<|channel|>", "analysis"),
)
_OWN: Mapping[ToolFormat, ReasoningMarks] = {ToolFormat.HARMONY: _HARMONY}


def reasoning_marks(tool_format: ToolFormat, tags: Tags) -> ReasoningMarks:
    """Returns the marks of a model that puts its reasoning between `tags`, unless its format has marks of its own."""
    opening, closing = tags
    return _OWN.get(tool_format) or ReasoningMarks((opening,), closing, (closing,))
