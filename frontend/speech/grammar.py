"""What an answer that thinks or calls must look like, in llguidance's Lark: https://github.com/guidance-ai/llguidance

A thought is free. Where a call begins it has to become one, of a function that was offered and with arguments that its
schema allows; what surrounds it is free, too, unless a call is required. Without `strict` the keywords of a schema that
cannot be enforced are left to the model. Whatever is accepted here `reader` reads the same way.
"""

from frontend import grammar as made
from frontend.errors import Unprocessable
from frontend.speech.offer import Function, Mode, Offer
from frontend.speech.reader import PYTHON, TAG
from frontend.speech.style import Format, Thinking

W = r"[ \n]{0,2}"  # as much as a model needs between the signs of a call
KEYS = {Format.HERMES: "arguments", Format.LLAMA: "parameters"}
CALL = {Format.HERMES: rf'call: "{TAG}" fun', Format.LLAMA: "call: fun"}
THOUGHT = {Thinking.MAYBE: r"\s*<think>(?s:.*)<\/think>", Thinking.INSIDE: r"(?s:.*)<\/think>"}
CLOSED = {Format.HERMES: rf"{W}\}}{W}<\/tool_call>", Format.LLAMA: rf"{W}\}}"}
THINKS = r"\s*<think>(?s:.*)"


def after_thought(thinking: Thinking, answer: str, param: str) -> str:
    """A grammar for what follows the thought, as one for the whole answer."""
    if not answer or thinking is Thinking.OVER:
        return answer
    return made.composed("\n".join([f"start: {_lead(thinking)} @answer", *_thought(thinking)]), param, answer)


def speaking(offer: Offer, format: Format, thinking: Thinking, *, python: bool = False, answer: str = "") -> str:
    """The grammar of an answer to somebody who offers functions; `answer` is one for its text, if any was asked for.

    `python`: the model's vocabulary has a special token <|python_tag|>. Raises Unprocessable naming the function's
    parameters, or `tools` when they are too much together.
    """
    several = offer.several and format is Format.HERMES
    lines = _start(offer.mode, thinking, bool(answer)) + _thought(thinking)
    lines += _called(offer.callable, format, python, several)
    if offer.mode is not Mode.REQUIRED and not answer:
        lines += _said([one.name for one in offer.functions], format, several, bool(offer.callable))
    try:
        return made.composed("\n".join(lines), "tools", answer)
    except Unprocessable:
        for one in offer.callable:  # whose fault is it?
            made.json_schema(one.parameters, one.param, lenient=not one.strict)
        raise


def _start(mode: Mode, thinking: Thinking, formed: bool) -> list[str]:
    lead = _lead(thinking)
    match mode, formed:
        case Mode.REQUIRED, _:
            return [f"start: {lead} calls"]
        case Mode.AUTO, True:
            return [f"start: {lead} (calls | @answer)"]
        case Mode.NONE, True:
            return [f"start: {lead} @answer"]
    return [{
        Thinking.OVER: "start: rest", Thinking.INSIDE: "start: think rest", Thinking.MAYBE: "start: think rest | first",
    }[thinking]]  # fmt: skip


def _lead(thinking: Thinking) -> str:
    return {Thinking.OVER: "", Thinking.INSIDE: "think GAP", Thinking.MAYBE: "(think GAP)?"}[thinking]


def _thought(thinking: Thinking) -> list[str]:
    return [] if thinking is Thinking.OVER else [f"think[lazy]: /{THOUGHT[thinking]}/", r"GAP: /\n*/"]


def _called(functions: list[Function], format: Format, python: bool, several: bool) -> list[str]:
    """`calls`, and the rules below it."""
    if not functions:
        return []
    tag = f"{PYTHON}? " if python and format is Format.LLAMA else ""
    lines = [r"calls: call (SEP call)*" if several else "calls: call", r"SEP: /\n{0,2}/"]
    lines += [CALL[format].replace("fun", f"{tag}fun"), f"CLOSED: /{CLOSED[format]}/"]
    lines += ["fun: " + " | ".join(f"fun_{i}" for i in range(len(functions)))]
    for i, one in enumerate(functions):
        schema = made.embedded(one.parameters, one.param, lenient=not one.strict)
        lines += [f"fun_{i}: HEAD_{i} args_{i} CLOSED", f"HEAD_{i}: /{_head(one.name, format)}/"]
        lines += [f"args_{i}: %json {schema}"]
    return lines


def _head(name: str, format: Format) -> str:
    kind = rf'("type"{W}:{W}"function"{W},{W})?' if format is Format.LLAMA else ""
    return rf'{W}\{{{W}{kind}"name"{W}:{W}"{name}"{W},{W}"{KEYS[format]}"{W}:{W}'


def _said(names: list[str], format: Format, several: bool, calling: bool) -> list[str]:
    """`rest` and, where it may think first but has not, `first`: free text, and calls in it."""
    if format is Format.LLAMA:
        start = r'\s*(<\|python_tag\|>\s*)?\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'
        calls = ["calls |"] if calling else [""]
        return [
            f"rest: {calls[0]} SAID", f"first: {calls[0]} SAID_FIRST",
            rf'SAID: /(?s:.*)/ & ~/{start}"({"|".join(names)})"(?s:.*)/',
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
