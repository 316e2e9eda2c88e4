"""The tools of a request in all chat dialects, and what follows for its answer: its grammar, and how to read it.

Knows the fields; frontend/output_parser knows what a call looks like. A budget for thinking (`budget_tokens`, the
degrees of `reasoning_effort`) is accepted and cannot be enforced: a model thinks, or does not.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from frontend.api.common import ModelContext
from frontend.api.fields import (
    Field,
    Reader,
    Table,
    anything,
    boolean,
    choice,
    each,
    exactly,
    integer,
    list_of,
    only,
    out_of_range,
    read,
    reads,
    record,
    schema,
    some_text,
    unknown_type,
    wrong_type,
)
from frontend.errors import Unprocessable
from frontend.output_parser.formats import ParserConfig, Reasoning, ToolFormat
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.output_parser.tool_grammar import after_reasoning, call_grammar
from frontend.output_parser.tool_syntax import MARKS
from frontend.text import grammar_builder

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Wanted = tuple[Mode, frozenset[str] | None]  # None: any of those that are offered


@reads({"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"})
def function_name(name: str, value: Any) -> str:
    if not NAME.fullmatch(some_text(name, value)):
        raise out_of_range(name, value, "1 to 128 letters, digits, _ or -")
    return str(value)


@reads({"type": "object", "properties": {"type": {"const": "object"}}})
def parameters(name: str, value: Any) -> dict[str, Any]:
    """A schema of an object; one that names no type is taken for one."""
    if type(value) is not dict:
        raise wrong_type(name, value, "a JSON schema")
    if value.get("type", "object") != "object":
        raise Unprocessable(f"`{name}.type` must be object", param=f"{name}.type", code="out_of_range")
    return {"type": "object", **value}


_function: Table = {
    "name": Field(function_name, required=True),
    "description": Field(exactly(str), ""),
    "parameters": Field(parameters, NO_PARAMETERS),
    "strict": Field(boolean, False),
}
_openai_tool = record({
    "type": Field(choice("function"), required=True),
    "function": Field(record(_function), required=True),
})  # fmt: skip
_flat_tool = record({
    "type": Field(choice("function"), required=True),
    **_function,
    "async": Field(only(False)),
    "defer_loading": Field(only(False)),
    "allowed_callers": Field(only(["direct"])),
})  # fmt: skip
_anthropic_tool = record({
    "type": Field(choice("custom")),
    "name": Field(function_name, required=True),
    "description": Field(exactly(str), ""),
    "input_schema": Field(parameters, required=True),
    "strict": Field(boolean, False),
    "cache_control": Field(anything),
    "eager_input_streaming": Field(boolean),
    "input_examples": Field(list_of(exactly(dict), 64)),
})  # fmt: skip


def _made(tool: Mapping[str, Any], param: str, schema: dict[str, Any]) -> Function:
    shown = {"name": tool["name"], "description": tool["description"], "parameters": schema}
    return Function(tool["name"], schema, tool["strict"], param, {"type": "function", "function": shown})


def _check_kind(name: str, value: Any, kind: str) -> None:
    """Other kinds have fields of their own, none of which is to blame."""
    given = value.get("type") if type(value) is dict else None
    if type(given) is str and given != kind:
        raise unknown_type(name, given, kind, "unsupported_field")


@reads(_openai_tool.schema)
def openai_tool(name: str, value: Any) -> Function:
    _check_kind(name, value, "function")
    tool = _openai_tool(name, value)["function"]
    return _made(tool, f"{name}.function.parameters", tool["parameters"])


@reads(_flat_tool.schema)
def flat_tool(name: str, value: Any) -> Function:
    """Of OpenAI's responses."""
    _check_kind(name, value, "function")
    tool = _flat_tool(name, value)
    return _made(tool, f"{name}.parameters", tool["parameters"])


@reads(_anthropic_tool.schema)
def anthropic_tool(name: str, value: Any) -> Function:
    _check_kind(name, value, "custom")
    tool = _anthropic_tool(name, value)
    return _made(tool, f"{name}.input_schema", tool["input_schema"])


_chosen: Table = {
    "type": Field(choice("function"), required=True),
    "function": Field(record({"name": Field(function_name, required=True)}), required=True),
}
_allowed: Table = {
    "type": Field(choice("allowed_tools"), required=True),
    "allowed_tools": Field(
        record({
            "mode": Field(choice("auto", "required"), required=True),
            "tools": Field(each(record(_chosen), MAX_TOOLS), required=True),
        }),
        required=True,
    ),
}  # fmt: skip
_flat_chosen: Table = {
    "type": Field(choice("function"), required=True),
    "name": Field(function_name, required=True),
}
_flat_allowed: Table = {
    "type": Field(choice("allowed_tools"), required=True),
    "mode": Field(choice("auto", "required"), required=True),
    "tools": Field(each(record(_flat_chosen), MAX_TOOLS), required=True),
}
_mode = choice(*Mode)


def _choice(chosen: Table, allowed: Table, inside: Callable[[dict[str, Any], str], dict[str, Any]]) -> Reader:
    """`inside` finds what an object of a type says."""

    @reads({"anyOf": [_mode.schema, schema(chosen), schema(allowed)]})
    def reader(name: str, value: Any) -> Wanted:
        if type(value) is not dict:
            return Mode(_mode(name, value)), None
        if value.get("type") == "allowed_tools":
            said = inside(read(allowed, value, f"{name}."), "allowed_tools")
            return Mode(said["mode"]), frozenset(inside(tool, "function")["name"] for tool in said["tools"])
        return Mode.REQUIRED, frozenset([inside(read(chosen, value, f"{name}."), "function")["name"]])

    return reader


openai_choice = _choice(_chosen, _allowed, lambda said, kind: said[kind])
flat_choice = _choice(_flat_chosen, _flat_allowed, lambda said, kind: said)


_anthropic_modes = {"auto": Mode.AUTO, "any": Mode.REQUIRED, "none": Mode.NONE}
_anthropic_any: Table = {
    "type": Field(choice(*_anthropic_modes, "tool"), required=True),
    "disable_parallel_tool_use": Field(boolean, False),
}
_anthropic_tool_choice: Table = {**_anthropic_any, "name": Field(function_name, required=True)}
_is_tool = {"properties": {"type": {"const": "tool"}}}


@reads({"anyOf": [{"allOf": [schema(_anthropic_tool_choice), _is_tool]},
                  {"allOf": [schema(_anthropic_any), {"not": _is_tool}]}]})  # fmt: skip
def anthropic_choice(name: str, value: Any) -> tuple[Wanted, bool]:
    """Also whether several calls may be made."""
    if type(value) is not dict:
        raise wrong_type(name, value, "an object")
    if value.get("type") == "tool":
        chosen = read(_anthropic_tool_choice, value, f"{name}.")
        return (Mode.REQUIRED, frozenset([chosen["name"]])), not chosen["disable_parallel_tool_use"]
    wanted = read(_anthropic_any, value, f"{name}.")
    return (_anthropic_modes[wanted["type"]], None), not wanted["disable_parallel_tool_use"]


degree = choice("none", "minimal", "low", "medium", "high", "xhigh", "max")

OPENAI_TOOLS: Table = {
    "tools": Field(each(openai_tool, MAX_TOOLS, empty=True), ()),
    "tool_choice": Field(openai_choice),
    "parallel_tool_calls": Field(boolean, True),
    "reasoning_effort": Field(degree),
}

FLAT_TOOLS: Table = {
    "tools": Field(each(flat_tool, MAX_TOOLS, empty=True), ()),
    "tool_choice": Field(flat_choice),
    "parallel_tool_calls": Field(boolean, True),
}

ANTHROPIC_TOOLS: Table = {
    "tools": Field(each(anthropic_tool, MAX_TOOLS, empty=True), ()),
    "tool_choice": Field(anthropic_choice, (None, True)),
    "thinking": Field(
        record({
            "type": Field(choice("enabled", "adaptive", "disabled"), required=True),
            "budget_tokens": Field(integer(1)),
            "display": Field(choice("summarized", "omitted")),
        })
    ),
}  # fmt: skip


def offer(functions: tuple[Function, ...], wanted: Wanted | None, several: bool, context: ModelContext) -> ToolChoice:
    """Raises Unprocessable for a choice of a function that is not offered, and when the model cannot call any."""
    mode, names = wanted or (Mode.AUTO, None)
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
    return ToolChoice(functions, mode, known if names is None else names, several)


def _check_format(context: ModelContext) -> None:
    if not context.style.shows_tools:
        raise Unprocessable(
            "`tools` are not offered by this model: its chat template has no place for them",
            param="tools", code="unsupported_field",
        )  # fmt: skip
    if context.style.tool_format is ToolFormat.NONE:
        raise Unprocessable(
            "`tools` are not offered: how this model writes a call is not known (see --tool-format)",
            param="tools", code="unsupported_field",
        )  # fmt: skip


def thinking(wanted: bool | None, param: str, context: ModelContext) -> dict[str, Any]:
    """The chat template's variables for thinking or not. Raises Unprocessable if the model cannot, when `wanted`."""
    style = context.style
    if wanted and not (style.has_reasoning or style.has_enable_thinking):
        raise Unprocessable(
            f"`{param}`: this model does not think before it answers", param=param, code="unsupported_field"
        )
    return {"enable_thinking": wanted} if wanted is not None and style.has_enable_thinking else {}


def effort(wanted: str | None, param: str, context: ModelContext) -> dict[str, Any]:
    """The same for OpenAI's degrees, which a template may know itself."""
    if wanted is None:
        return {}
    if context.style.has_reasoning_effort:
        return {"reasoning_effort": wanted}
    return thinking(wanted not in ("none", "minimal"), param, context)


async def answer_form(
    offer: ToolChoice, begins: Reasoning, text: str, context: ModelContext
) -> tuple[str, ParserConfig | None]:
    """The whole answer's grammar, `text` being the one for its text, and how it is to be read (None: as it stands).

    Either grammar is empty for none.
    """
    calls = context.style.tool_format
    make: Callable[[], str] | None = None
    if offer.functions:
        mark = context.tokenizer.special_id(MARKS.get(calls, ""))
        make = partial(call_grammar, offer, calls, begins, mark=mark, answer=text)
    elif text and begins is not Reasoning.DONE:
        make = partial(after_reasoning, begins, text, "response_format")
    grammar = await grammar_builder.in_thread(make) if make else text
    return grammar, ParserConfig.of(begins, calls, [one.name for one in offer.callable_functions])
