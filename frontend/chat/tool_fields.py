"""The fields of all chat formats for tools and for the tool choice.

This module does not apply tools to an answer. tools.py does, and the first request with tools imports it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.model_context import ModelContext
from frontend.output_parser.model_format import Function, Mode, ToolChoice
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import Text, doc

MAX_TOOLS = 128

ModeAndNames = tuple[Mode, frozenset[str] | None]  # None: any of the offered functions may be called
FunctionName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z", extra_json_schema={"pattern": "^[A-Za-z0-9_-]{1,128}$"})
]
Parameters = Annotated[dict[str, Any], Meta(extra_json_schema={"properties": {"type": {"const": "object"}}})]


def _check_object(name: str, parameters: dict[str, Any] | None) -> None:
    if parameters and parameters.get("type", "object") != "object":
        raise FieldError(f"{name}.type", "must be object")


# the tools


class FunctionDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        _check_object("parameters", self.parameters)


_CALLED_DIRECTLY: dict[str, Sequence[Any]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}


class FunctionTool(RequestModel, tag="function"):
    UNKNOWN_TYPE = "unsupported_field"

    function: FunctionDefinition


class TextInput(RequestModel, tag="text"):
    """Any text."""


class Grammar(RequestModel):
    """A grammar of a text. It is enforced where calls are JSON, and Lark is shown to the model."""

    syntax: Literal["lark", "regex"]
    definition: Text


class GrammarInput(RequestModel, tag="grammar"):
    grammar: Grammar


class FlatGrammarInput(Grammar, tag="grammar"):
    """GrammarInput in OpenAI's Responses API."""


class FreeformDefinition(RequestModel):
    name: FunctionName
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class ChatFreeformTool(RequestModel, tag="custom"):
    """A tool whose input is a text. The model calls it as a function with one parameter."""

    custom: FreeformDefinition


class FlatFunctionTool(FunctionDefinition, tag="function"):
    """A function of OpenAI's Responses API."""

    IGNORED: ClassVar[Names] = ("output_schema",)

    UNKNOWN_TYPE = "unsupported_field"
    ONLY: ClassVar = {"async": (False,), **_CALLED_DIRECTLY}


class FreeformTool(RequestModel, tag="custom"):
    """ChatFreeformTool in OpenAI's Responses API."""

    UNKNOWN_TYPE = "unsupported_field"
    ONLY: ClassVar = {"async": (False,), **_CALLED_DIRECTLY}

    name: FunctionName
    description: str | None = None
    format: TextInput | FlatGrammarInput | None = None


# Tools of OpenAI's Responses API that Codex and other clients send by default, but that only OpenAI's models can call.
# They are not shown to the model, so such a client works with its functions only.


class WebSearchTool(RequestModel, tag="web_search"):
    IGNORED: ClassVar[Names] = (
        "external_web_access", "indexed_web_access", "filters", "user_location", "search_context_size",
        "search_content_types",
    )  # fmt: skip


class LocalShellTool(RequestModel, tag="local_shell"):
    """A tool that runs commands in the client's shell."""


class ImageGenerationTool(RequestModel, tag="image_generation"):
    IGNORED: ClassVar[Names] = ("output_format",)


class NamespaceTool(RequestModel, tag="namespace"):
    """A group of tools with a common name."""

    IGNORED: ClassVar[Names] = ("name", "description", "tools")


class ToolSearchTool(RequestModel, tag="tool_search"):
    """A tool that finds other tools, which the request does not list."""

    IGNORED: ClassVar[Names] = ("execution", "description", "parameters")


UnusedTool = WebSearchTool | LocalShellTool | ImageGenerationTool | NamespaceTool | ToolSearchTool


class CustomTool(RequestModel):
    """A tool of Anthropic's Messages API."""

    IGNORED: ClassVar[Names] = ("cache_control",)

    UNKNOWN_TYPE = "unsupported_field"
    ONLY: ClassVar = _CALLED_DIRECTLY

    name: FunctionName
    input_schema: Parameters
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None

    def __post_init__(self) -> None:
        _check_object("input_schema", self.input_schema)


Tool = FunctionTool | ChatFreeformTool | FlatFunctionTool | FreeformTool | CustomTool | UnusedTool


# the tool choice


class NamedFunction(RequestModel):
    name: FunctionName


class FunctionChoice(RequestModel, tag="function"):
    function: NamedFunction


class CustomChoice(RequestModel, tag="custom"):
    """Names one custom tool."""

    custom: NamedFunction


class AllowedFunction(RequestModel, tag="function"):
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class AllowedCustomTool(RequestModel, tag="custom"):
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction | AllowedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestModel, tag="allowed_tools"):
    allowed_tools: AllowedTools


class FlatFunctionChoice(NamedFunction, tag="function"):
    """Names one function. In OpenAI's Responses API, a choice has its fields directly, without an inner object."""


class FlatCustomChoice(NamedFunction, tag="custom"):
    """CustomChoice in OpenAI's Responses API."""


class FlatAllowedFunction(NamedFunction):
    type: Literal["function", "custom"]


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
OneChoice = FunctionChoice | CustomChoice | FlatFunctionChoice | FlatCustomChoice
OpenAIChoice = _ModeName | OneChoice | AllowedToolsChoice | FlatAllowedToolsChoice | None
AnthropicChoice = AutoChoice | AnyChoice | NoneChoice | ToolNameChoice


def openai_choice(choice: OpenAIChoice) -> ModeAndNames:
    match choice:
        case None:
            return Mode.AUTO, None
        case FunctionChoice(function=named) | CustomChoice(custom=named):
            return Mode.REQUIRED, frozenset([named.name])
        case FlatFunctionChoice(name=name) | FlatCustomChoice(name=name):
            return Mode.REQUIRED, frozenset([name])
        case AllowedToolsChoice(allowed_tools=allowed):
            return Mode(allowed.mode), frozenset([tool.name for tool in allowed.tools])
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

_tools, _choice = "Functions that the model may call", "Whether and which of the `tools` the model must call"
FunctionTools = Annotated[
    Annotated[list[FunctionTool | ChatFreeformTool], Meta(max_length=MAX_TOOLS)] | None, doc(_tools)
]
FlatFunctionTools = Annotated[
    Annotated[list[FlatFunctionTool | FreeformTool | UnusedTool], Meta(max_length=MAX_TOOLS)] | None,
    doc("Functions that the model may call; it is not shown tools that only OpenAI's models can call"),
]
CustomTools = Annotated[Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None, doc(_tools)]
FunctionToolChoice = Annotated[_ModeName | FunctionChoice | CustomChoice | AllowedToolsChoice | None, doc(_choice)]
FlatToolChoice = Annotated[
    _ModeName | FlatFunctionChoice | FlatCustomChoice | FlatAllowedToolsChoice | None, doc(_choice)
]
CustomToolChoice = Annotated[AnthropicChoice | None, doc(_choice)]
ParallelToolCalls = Annotated[bool, doc("false: at most one call in an answer")]


def tool_choice(
    tools: Sequence[Tool] | None, requested: ModeAndNames, parallel: bool, context: ModelContext
) -> ToolChoice:
    """Returns the tools of a request and the tool choice. Raises Unprocessable as `tools.checked_choice` does."""
    mode, names = requested
    if not tools and not names and mode is not Mode.REQUIRED:
        return ToolChoice((), mode, frozenset(), parallel)
    from frontend.chat.tools import checked_choice

    return checked_choice(offered(tools), requested, parallel, context)


def openai_tool_choice(
    tools: Sequence[Tool] | None, choice: OpenAIChoice, parallel: bool, context: ModelContext
) -> ToolChoice:
    """Does the same as `tool_choice` for OpenAI's formats, where a choice of one function means exactly one call.

    `required` without tools has no effect, as in llama.cpp, because LlamaIndex sends it with every request for a JSON
    object.
    """
    choice = None if choice == "required" and not tools else choice
    several = parallel and not isinstance(choice, OneChoice)
    return tool_choice(tools, openai_choice(choice), several, context)


async def shown(tools: Sequence[Tool] | None, choice: OpenAIChoice) -> tuple[Function, ...]:
    """Returns the functions that the prompt of a request shows. Raises Unprocessable for schemas as an answer does."""
    return await checked(() if choice == "none" else offered(tools))


async def checked(functions: Sequence[Function]) -> tuple[Function, ...]:
    """Returns functions whose schemas were checked as those of an answer are. Raises Unprocessable."""
    if functions:
        from frontend.structured_output.tool_grammar import check_parameters

        await check_parameters(functions)
    return tuple(functions)


def offered(tools: Sequence[Tool] | None) -> tuple[Function, ...]:
    """Returns the functions among the tools of a request."""
    if not tools:
        return ()
    from frontend.chat.tools import functions

    return functions(tools)
