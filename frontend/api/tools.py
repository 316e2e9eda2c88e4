"""The tools of a request in all chat formats, and what follows for its answer: its grammar, and how to parse it.

Knows the fields; frontend/output_parser knows what a call looks like. The degrees of `reasoning_effort` are the
template's, or else cannot be told apart: a model thinks, or does not.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.common import ModelContext
from frontend.api.request_model import FieldError, RequestModel
from frontend.api.request_types import Ignored, Positive, doc
from frontend.errors import Unprocessable
from frontend.output_parser.formats import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.output_parser.tool_grammar import output_grammar
from frontend.output_parser.tool_syntax import specials_of
from frontend.text import grammar_builder

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ModeAndNames = tuple[Mode, frozenset[str] | None]  # None: any of the offered functions may be called
FunctionName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z", extra_json_schema={"pattern": "^[A-Za-z0-9_-]{1,128}$"})
]
Parameters = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"const": "object"}}})]


def _check_parameters(name: str, parameters: dict[str, Any] | None) -> None:
    if parameters and parameters.get("type", "object") != "object":
        raise FieldError(f"{name}.type", "must be object")


# the tools


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        _check_parameters("parameters", self.parameters)


class FunctionTool(RequestModel):
    UNKNOWN_TYPE = "unsupported_field"

    type: Literal["function"]
    function: FunctionDefinition


class FlatFunctionTool(FunctionDefinition):
    """A tool of OpenAI's responses."""

    UNKNOWN_TYPE = "unsupported_field"
    ONLY: ClassVar = {"async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"],)}

    type: Literal["function"]


class CustomTool(RequestModel):
    """A tool of Anthropic's messages."""

    UNKNOWN_TYPE = "unsupported_field"

    name: FunctionName
    input_schema: Parameters
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None

    def __post_init__(self) -> None:
        _check_parameters("input_schema", self.input_schema)


def functions(tools: Sequence[FunctionTool | FlatFunctionTool | CustomTool] | None) -> tuple[Function, ...]:
    return tuple([_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())])


def _function(tool: FunctionTool | FlatFunctionTool | CustomTool, path: str) -> Function:
    definition = tool.function if isinstance(tool, FunctionTool) else tool
    match tool:
        case FunctionTool():
            schema, param = tool.function.parameters, f"{path}.function.parameters"
        case FlatFunctionTool():
            schema, param = tool.parameters, f"{path}.parameters"
        case CustomTool():
            schema, param = tool.input_schema, f"{path}.input_schema"
    schema = NO_PARAMETERS if schema is None else {"type": "object", **schema}
    shown_definition = {"name": definition.name, "description": definition.description or "", "parameters": schema}
    return Function(
        definition.name, schema, bool(definition.strict), param, {"type": "function", "function": shown_definition}
    )


# the tool choice


class NamedFunction(RequestModel):
    name: FunctionName


class FunctionChoice(RequestModel, tag="function"):
    function: NamedFunction


class AllowedFunction(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestModel, tag="allowed_tools"):
    allowed_tools: AllowedTools


class FlatFunctionChoice(NamedFunction, tag="function"):
    """The choices of OpenAI's responses are without the inner object."""


class FlatAllowedFunction(NamedFunction):
    type: Literal["function"]


class FlatAllowedToolsChoice(RequestModel, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatAllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class _AnthropicChoice(RequestModel):
    disable_parallel_tool_use: bool = False


class AutoChoice(_AnthropicChoice, tag="auto"):
    """The model decides."""


class AnyChoice(_AnthropicChoice, tag="any"):
    """The model must call one of the tools."""


class NoneChoice(_AnthropicChoice, tag="none"):
    """The model must not call a tool."""


class ToolNameChoice(_AnthropicChoice, tag="tool"):
    name: FunctionName


_ModeName = Literal["none", "auto", "required"]
OpenAIChoice = _ModeName | FunctionChoice | AllowedToolsChoice | FlatFunctionChoice | FlatAllowedToolsChoice | None
AnthropicChoice = AutoChoice | AnyChoice | NoneChoice | ToolNameChoice


def openai_choice(choice: OpenAIChoice) -> ModeAndNames:
    match choice:
        case None:
            return Mode.AUTO, None
        case FunctionChoice(function=function):
            return Mode.REQUIRED, frozenset([function.name])
        case FlatFunctionChoice(name=name):
            return Mode.REQUIRED, frozenset([name])
        case AllowedToolsChoice(allowed_tools=allowed):
            return Mode(allowed.mode), frozenset([tool.function.name for tool in allowed.tools])
        case FlatAllowedToolsChoice(mode=mode, tools=tools):
            return Mode(mode), frozenset([tool.name for tool in tools])
        case _:
            return Mode(choice), None


def anthropic_choice(choice: AnthropicChoice | None) -> ModeAndNames:
    match choice:
        case ToolNameChoice(name=name):
            return Mode.REQUIRED, frozenset([name])
        case AnyChoice():
            return Mode.REQUIRED, None
        case NoneChoice():
            return Mode.NONE, None
        case _:
            return Mode.AUTO, None


# the fields


class Thinking(RequestModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


_tools, _choice = "Functions that the model may call", "Whether and which of the `tools` the model must call"
FunctionTools = Annotated[Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None, doc(_tools)]
FlatFunctionTools = Annotated[Annotated[list[FlatFunctionTool], Meta(max_length=MAX_TOOLS)] | None, doc(_tools)]
CustomTools = Annotated[Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None, doc(_tools)]
FunctionToolChoice = Annotated[_ModeName | FunctionChoice | AllowedToolsChoice | None, doc(_choice)]
FlatToolChoice = Annotated[_ModeName | FlatFunctionChoice | FlatAllowedToolsChoice | None, doc(_choice)]
CustomToolChoice = Annotated[AnthropicChoice | None, doc(_choice)]
ParallelToolCalls = Annotated[bool, doc("false: at most one call in an answer")]
Degree = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningEffort = Annotated[
    Degree | None,
    doc("`none` and `minimal`: do not think; others: think; the degree goes to templates that know degrees"),
]
ThinkingField = Annotated[
    Thinking | None,
    doc("Whether to think, and `budget_tokens` at most; with `display: omitted` the text is not sent"),
]


# how the fields affect the prompt and the answer


def checked_choice(
    functions: tuple[Function, ...], requested: ModeAndNames, parallel: bool, context: ModelContext
) -> ToolChoice:
    """Returns the tools and the choice among them. Raises Unprocessable for a choice of an unknown function, and if the
    model cannot call functions.
    """
    mode, names = requested
    known = frozenset(one.name for one in functions)
    twice = [name for name, times in Counter(one.name for one in functions).items() if times > 1]
    if twice:
        raise Unprocessable(f"`tools` have two functions named {twice[0]}", param="tools", code="out_of_range")
    if functions:
        _check_format(context)
    if mode is Mode.REQUIRED and not functions:
        raise Unprocessable("`tool_choice` needs `tools`", param="tool_choice", code="out_of_range")
    if unknown := (names or frozenset()) - known:
        raise Unprocessable(
            f"`tool_choice` names {sorted(unknown)[0]}, which is not among the `tools`",
            param="tool_choice", code="out_of_range",
        )  # fmt: skip
    return ToolChoice(functions, mode, known if names is None else names, parallel)


def _check_format(context: ModelContext) -> None:
    if not (context.style.shows_tools or context.style.tools_as_text):
        raise Unprocessable(
            "`tools` are not supported by this model: its chat template has no place for them",
            param="tools", code="unsupported_field",
        )  # fmt: skip
    if context.style.tool_format is ToolFormat.NONE:
        raise Unprocessable(
            "`tools` are not supported: how this model writes a call is not known (see --tool-format)",
            param="tools", code="unsupported_field",
        )  # fmt: skip


def thinking(wanted: bool | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables that turn thinking on or off; none for a model that cannot be told, such as one
    that never thinks."""
    switch = context.style.thinking_switch
    return {switch: wanted} if wanted is not None and switch else {}


def effort(wanted: str | None, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables for an OpenAI effort; thinking on or off if the template knows no degrees."""
    if wanted is None:
        return {}
    if context.style.has_reasoning_effort:
        return {"reasoning_effort": context.style.degree(wanted)}
    return thinking(wanted not in ("none", "minimal"), context)


async def grammar_and_parser(
    tool_choice: ToolChoice, begins: Reasoning, text_grammar: str, context: ModelContext
) -> tuple[str, ParserConfig | None]:
    """Returns the grammar of the whole answer (empty if it is free), and how to parse it (None if it is plain text).

    text_grammar: the grammar of the answer's text; empty if the text is free

    Raises Unprocessable if a call is forced and the text has a grammar, as such an answer has no text.
    """
    if text_grammar and tool_choice.mode is Mode.REQUIRED:
        raise Unprocessable(
            "`tool_choice` forces a call, so no text can keep to a structured output: leave out one of them, or let "
            "the model choose with `auto`",
            param="tool_choice", code="conflicting_fields",
        )  # fmt: skip
    style, functions = context.style, tool_choice.callable_functions
    grammar = text_grammar
    specials = context.tokenizer.special_ids_of(specials_of(style.tool_format, style.tags))
    if tool_choice.functions or (text_grammar and begins is not Reasoning.DONE):
        grammar = await grammar_builder.in_thread(
            partial(
                output_grammar, tool_choice, style.tool_format, begins,
                specials=specials, answer=text_grammar, tags=style.tags,
            )
        )  # fmt: skip
    must_call = tool_choice.mode is Mode.REQUIRED
    return grammar, style.parser_config(begins, functions, must_call=must_call, specials=specials)
