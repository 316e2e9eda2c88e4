"""Applies tools to an answer: which functions it may call, and the grammar of an answer with calls.

frontend/output_parser defines how each model writes a call.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.chat.tool_fields import (
    ChatFreeformTool,
    CustomTool,
    FlatFunctionTool,
    FreeformDefinition,
    FreeformTool,
    FunctionDefinition,
    FunctionTool,
    Grammar,
    GrammarInput,
    ModeAndNames,
    Tool,
)
from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import INPUT, Custom, Function, Mode, ToolChoice, ToolFormat

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def functions(tools: Sequence[Tool] | None) -> tuple[Function, ...]:
    made = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    return tuple([one for one in made if one is not None])


def _function(tool: Tool, path: str) -> Function | None:
    """Returns the function of a tool; None for a tool that only OpenAI's models can call."""
    definition: FunctionDefinition | CustomTool
    match tool:
        case FunctionTool(function=definition):
            schema, param = definition.parameters, f"{path}.function.parameters"
        case FlatFunctionTool() as definition:
            schema, param = definition.parameters, f"{path}.parameters"
        case CustomTool() as definition:
            schema, param = definition.input_schema, f"{path}.input_schema"
        case ChatFreeformTool(custom=custom):
            return _freeform(custom, f"{path}.custom")
        case FreeformTool() as custom:
            return _freeform(custom, path)
        case _:
            return None
    schema = NO_PARAMETERS if schema is None else {"type": "object", **schema}
    shown_definition = {"name": definition.name, "description": definition.description or "", "parameters": schema}
    return Function(
        definition.name, schema, bool(definition.strict), param, {"type": "function", "function": shown_definition}
    )


def _freeform(tool: FreeformDefinition | FreeformTool, path: str) -> Function:
    """Returns the function of one text that stands for a custom tool."""
    form = tool.format
    nested = isinstance(form, GrammarInput)
    grammar = form.grammar if isinstance(form, GrammarInput) else form
    text: dict[str, Any] = {"type": "string"}
    description, syntax, definition = tool.description or "", "", ""
    if isinstance(grammar, Grammar):
        syntax, definition = grammar.syntax, grammar.definition
        if syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        else:
            description = f"{description}\n\nThe input keeps to this Lark grammar:\n{grammar.definition}".strip()
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    param = f"{path}.format.grammar.definition" if nested else f"{path}.format.definition"
    shown = {"name": tool.name, "description": description, "parameters": schema}
    custom = Custom(syntax, definition, param, msgspec.to_builtins(form))
    return Function(tool.name, schema, False, param, {"type": "function", "function": shown}, custom)


def checked_choice(
    functions: tuple[Function, ...], requested: ModeAndNames, parallel: bool, context: ModelContext
) -> ToolChoice:
    """Returns the tools and the tool choice.

    Raises Unprocessable for a choice of an unknown function, and if the model cannot call functions.
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
