"""The grammar of an answer that thinks or calls functions, in llguidance's Lark: https://github.com/guidance-ai/llguidance

Thoughts are free. What begins as a call must become one, of a function that was offered and with arguments that its
schema allows; the text around it is free, too, unless a call is required. Without `strict`, keywords of a schema that
cannot be enforced are ignored. Whatever this accepts, `reader` reads in the same way.
"""

from frontend.errors import Unprocessable
from frontend.output_parser.formats import Reasoning, ToolFormat
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.output_parser.tool_syntax import TAG
from frontend.text import grammar as made

W = r"[ \n]{0,2}"  # as much as a model needs between the signs of a call
KEYS = {ToolFormat.HERMES: "arguments", ToolFormat.LLAMA: "parameters", ToolFormat.MISTRAL: "arguments"}
THOUGHT = {Reasoning.MAYBE: r"\s*<think>(?s:.*)<\/think>", Reasoning.INSIDE: r"(?s:.*)<\/think>"}
CLOSED = {ToolFormat.HERMES: rf"{W}\}}{W}<\/tool_call>", ToolFormat.LLAMA: rf"{W}\}}", ToolFormat.MISTRAL: rf"{W}\}}"}
BEGUN = {  # how an answer begins that can only be a call; NAMES are those of the functions
    ToolFormat.LLAMA: r'\s*(<\|python_tag\|>\s*)?\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(NAMES)"',
    ToolFormat.MISTRAL: r'\s*(\[TOOL_CALLS\]|\[\s*\{\s*"name"\s*:\s*"(NAMES)")',
}
THINKS = r"\s*<think>(?s:.*)"


def after_thought(thinking: Reasoning, answer: str, param: str) -> str:
    """A grammar for what follows the thought, as one for the whole answer."""
    if not answer or thinking is Reasoning.OVER:
        return answer
    return made.composed("\n".join([f"start: {_lead(thinking)} @answer", *_thought(thinking)]), param, answer)


def call_grammar(
    offer: ToolChoice, format: ToolFormat, thinking: Reasoning, *, mark: int | None = None, answer: str = ""
) -> str:
    """The grammar of an answer that may call functions; `answer` is one for its text, if any was asked for.

    `mark`: the format's mark, if that is a special token of the model's vocabulary. Raises Unprocessable naming the
    function's parameters, or `tools` when they are too much together.
    """
    several = offer.several and format is not ToolFormat.LLAMA
    lines = _start(offer.mode, thinking, bool(answer)) + _thought(thinking)
    lines += _call_rules(offer.callable, format, mark, several)
    if offer.mode is not Mode.REQUIRED and not answer:
        lines += _text_rules([one.name for one in offer.functions], format, several, bool(offer.callable))
    try:
        return made.composed("\n".join(lines), "tools", answer)
    except Unprocessable:
        for one in offer.callable:  # which of them is it?
            made.json_schema(one.parameters, one.param, lenient=not one.strict)
        raise


def _start(mode: Mode, thinking: Reasoning, formed: bool) -> list[str]:
    lead = _lead(thinking)
    match mode, formed:
        case Mode.REQUIRED, _:
            return [f"start: {lead} calls"]
        case Mode.AUTO, True:
            return [f"start: {lead} (calls | @answer)"]
        case Mode.NONE, True:
            return [f"start: {lead} @answer"]
    return [{
        Reasoning.OVER: "start: rest", Reasoning.INSIDE: "start: think rest",
        Reasoning.MAYBE: "start: think rest | first",
    }[thinking]]  # fmt: skip


def _lead(thinking: Reasoning) -> str:
    return {Reasoning.OVER: "", Reasoning.INSIDE: "think GAP", Reasoning.MAYBE: "(think GAP)?"}[thinking]


def _thought(thinking: Reasoning) -> list[str]:
    return [] if thinking is Reasoning.OVER else [f"think[lazy]: /{THOUGHT[thinking]}/", r"GAP: /\n*/"]


def _call_rules(functions: list[Function], format: ToolFormat, mark: int | None, several: bool) -> list[str]:
    """`calls`, and the rules below it."""
    if not functions:
        return []
    ways = {"fun": "", **_opening_ways(format, mark)}
    lines = [*_calls(format, mark, several), f"CLOSED: /{CLOSED[format]}/"]
    lines += [f"{way}: " + " | ".join(f"{way}_{i}" for i in range(len(functions))) for way in ways]
    for i, one in enumerate(functions):
        schema = made.embedded(one.parameters, one.param, lenient=not one.strict)
        lines += [f"args_{i}: %json {schema}"]
        for way, lead in ways.items():
            lines += [f"{way}_{i}: {way.upper()}_{i} args_{i} CLOSED"]
            lines += [f"{way.upper()}_{i}: /{lead}{_head(one.name, format)}/"]
    return lines


def _opening_ways(format: ToolFormat, mark: int | None) -> dict[str, str]:
    """A second way to write a call: with what opens the first one. It is one lexeme, as text may begin like it."""
    if format is not ToolFormat.MISTRAL:
        return {}
    return {"opened": rf"{W}\[" if mark is not None else rf"{W}\[TOOL_CALLS\]{W}\["}


def _calls(format: ToolFormat, mark: int | None, several: bool) -> list[str]:
    """What stands around the functions of an answer that only calls."""
    special = "" if mark is None else f"<[{mark}]>"
    match format:
        case ToolFormat.MISTRAL:
            more = "(COMMA fun)*" if several else ""
            return [f"calls: {special} opened {more} ENDED", f"COMMA: /{W},/", rf"ENDED: /{W}\]/"]
        case ToolFormat.LLAMA:
            return [f"calls: {special}? fun" if special else "calls: fun"]
        case _:
            more = "(SEP call)*" if several else ""
            return [f"calls: call {more}", r"SEP: /\n{0,2}/", f'call: "{TAG}" fun']


def _head(name: str, format: ToolFormat) -> str:
    kind = rf'("type"{W}:{W}"function"{W},{W})?' if format is ToolFormat.LLAMA else ""
    return rf'{W}\{{{W}{kind}"name"{W}:{W}"{name}"{W},{W}"{KEYS[format]}"{W}:{W}'


def _text_rules(names: list[str], format: ToolFormat, several: bool, calling: bool) -> list[str]:
    """`rest` and, where it may think first but has not, `first`: free text, and calls in it."""
    if (begun := BEGUN.get(format)) is not None:
        calls = "calls |" if calling else ""
        return [
            f"rest: {calls} SAID", f"first: {calls} SAID_FIRST",
            f"SAID: /(?s:.*)/ & ~/{begun.replace('NAMES', '|'.join(names))}(?s:.*)/",
            f"SAID_FIRST: SAID & ~/{THINKS}/",
        ]  # fmt: skip
    last = [f"END: /(?s:.*)/ & ~/(?s:.*){TAG}(?s:.*)/", f"END_FIRST: END & ~/{THINKS}/"]
    if not calling:
        return ["rest: END", "first: END_FIRST", *last]
    return [
        f"rest: (tool fun){'*' if several else '?'} END",
        f"first: tool_first fun {'(tool fun)*' if several else ''} END | END_FIRST",
        "tool[lazy]: TOOL", "tool_first[lazy]: TOOL_FIRST",
        f"TOOL: /(?s:.*){TAG}/", f"TOOL_FIRST: TOOL & ~/{THINKS}/", *last,
    ]  # fmt: skip
