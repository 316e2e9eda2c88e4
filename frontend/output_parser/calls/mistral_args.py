"""Output of newer Mistral models: special tokens mark reasoning and calls, and everything else is text.

    [THINK]…[/THINK]…[TOOL_CALLS]NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}

Some models write `[CALL_ID]` and an id before `[ARGS]`. This module parses the format, and has the rules of its
grammar. A name that is no offered function becomes text, with all that follows it; arguments that are not JSON become
text, too. Only the name of a call that was cut off before its arguments is dropped.
"""

import re
from collections.abc import Mapping

from frontend.output_parser.calls.calls import Calls
from frontend.output_parser.events import Event, ReasoningText, Text
from frontend.output_parser.formats import ParserConfig, Reasoning
from frontend.output_parser.marks import ARGS, BLANK, CALL_ID, MISTRAL_ARGS, THINK, THOUGHT, TOOL_CALLS
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice, check_specials
from frontend.text import grammar_builder

ALL = "".join(MISTRAL_ARGS.values())
PIECES = re.compile(f"[{ALL}]|[^{ALL}]+")

Kind = type[Text] | type[ReasoningText]


class MistralParser:
    """Parses one output, whose special tokens are stand-ins (`marks`)."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._names = parser_config.function_names
        self._reasoning: Kind = Text if parser_config.reasoning_is_text else ReasoningText
        self._kind = self._reasoning if parser_config.reasoning is Reasoning.OPEN else Text
        self._head: str | None = None  # the text after [TOOL_CALLS]; None outside of a call
        self._name = ""  # the function whose arguments may follow
        self._after_call = False  # whether no text has followed the last call, so that blanks are dropped
        self._calls = Calls()

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, or may still see it begin."""
        return Reasoning.OPEN if self._kind is ReasoningText else Reasoning.UNDECIDED

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self._calls.called

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in PIECES.findall(text):
            events += self._feed_mark(piece) if piece in ALL else self._feed_text(piece)
        return events

    def finish(self) -> list[Event]:
        return self._calls.held()

    def _feed_mark(self, mark: str) -> list[Event]:
        if mark == CALL_ID and self._head is not None:
            self._head += mark
            return []
        events = self._calls.held()
        self._calls.drop()
        self._after_call, self._name = False, ""
        head, self._head = self._head, "" if mark == TOOL_CALLS else None
        if head is not None and mark == ARGS:
            self._name = head.partition(CALL_ID)[0].strip()
        elif head is not None:
            events += self._say(head.replace(CALL_ID, " "))
        self._kind = self._reasoning if mark == THINK else Text
        return events

    def _feed_text(self, text: str) -> list[Event]:
        if self._head is not None:
            self._head += text
            return []
        if self._name:
            return self._feed_beginning(text)
        if not self._calls.open:
            return self._say(text)
        events, rest = self._calls.feed(text)
        self._after_call = not self._calls.open and not self._calls.broke
        return events + self._say(rest)

    def _feed_beginning(self, text: str) -> list[Event]:
        """Feeds the first character of arguments, which shows whether they are an object."""
        if not (text := text.lstrip()):
            return []
        name, self._name = self._name, ""
        if text[0] == "{" and name in self._names:
            return [self._calls.begin(name), *self._feed_text(text)]
        return self._say(f"{name} {text}")

    def _say(self, text: str) -> list[Event]:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return [self._kind(text)] if text else []


class AnswerText:
    """Blanks out reasoning and calls, so that stop strings are found in text for the user only. Keeps the length."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._shown_after = {THOUGHT, THINK} if parser_config.reasoning_is_text else {THOUGHT}
        self._shown = parser_config.reasoning is not Reasoning.OPEN or parser_config.reasoning_is_text

    def __call__(self, text: str) -> str:
        return "".join(map(self._blanked, PIECES.findall(text)))

    def _blanked(self, piece: str) -> str:
        if piece in ALL:
            self._shown = piece in self._shown_after
            return BLANK
        return piece if self._shown else BLANK * len(piece)


def text_rules(
    tool_choice: ToolChoice, reasoning: Reasoning, specials: Mapping[str, int], has_answer: bool
) -> list[str]:
    """Returns the rules of the format's grammar: reasoning, then text or `@answer`, then calls, as far as allowed.

    Raises Unprocessable if the vocabulary lacks a special token that calls need.
    """
    functions, mode = tool_choice.callable_functions, tool_choice.mode
    check_specials(("[TOOL_CALLS]", "[ARGS]") if functions else (), specials, tool_choice)
    says = ["@answer" if has_answer else "TEXT"] * (mode is not Mode.REQUIRED or not functions)
    calls = ["calls" if has_answer or mode is Mode.REQUIRED else "TEXT calls"] * bool(functions)
    thinks = "[THINK]" in specials and "[/THINK]" in specials
    lead = {Reasoning.OPEN: "TEXT m_thought", Reasoning.UNDECIDED: "think?"}.get(reasoning, "") if thinks else ""
    lines = [f"start: {lead} ({' | '.join(says + calls)})", "TEXT: /(?s:.*)/"]
    if thinks:
        lines += ["think: m_think TEXT m_thought", f"m_think: <[{specials['[THINK]']}]>"]
        lines += [f"m_thought: <[{specials['[/THINK]']}]>"]
    return lines + _call_rules(functions, specials, tool_choice.parallel)


def _call_rules(functions: list[Function], specials: Mapping[str, int], parallel: bool) -> list[str]:
    if not functions:
        return []
    id = f"(<[{specials['[CALL_ID]']}]> ID)?" if "[CALL_ID]" in specials else ""
    lines = ["calls: call+" if parallel else "calls: call", "ID: /[A-Za-z0-9]{9}/"]
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = grammar_builder.embedded(function.parameters, function.param, lenient=not function.strict)
        lines += [
            f'call_{i}: <[{specials["[TOOL_CALLS]"]}]> "{function.name}" {id} <[{specials["[ARGS]"]}]> args_{i}',
            f"args_{i}: %json {schema}",
        ]
    return lines
