"""The grammar of an output with reasoning or tool calls, in llguidance's Lark:
https://github.com/guidance-ai/llguidance

Reasoning is unconstrained. Text that begins as a call must become a call of an offered function, with arguments that
the function's schema allows. The text around calls is unconstrained, unless a call is required. Without `strict`,
schema keywords that cannot be enforced are ignored. In any output that the grammar accepts, `parser` finds the same
calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from frontend.errors import Unprocessable
from frontend.output_parser.calls.mistral_args import text_rules
from frontend.output_parser.calls.tool_syntax import SYNTAX, Form, ToolCallSyntax
from frontend.output_parser.formats import THINK, Reasoning, Tags, ToolFormat
from frontend.output_parser.grammar.argument_rules import argument_rules
from frontend.output_parser.grammar.harmony_grammar import message_rules
from frontend.output_parser.grammar.lark import ANY, Rules, Specials, W, either, escaped, words
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.text import grammar_builder

ANSWER = "response_format"
# The bool: whether the answer has a grammar.
RulesOf = Callable[[ToolChoice, Reasoning, Mapping[str, int], bool], list[str]]
# The formats whose reasoning and calls are not tagged text.
RULES: Mapping[ToolFormat, RulesOf] = {
    ToolFormat.HARMONY: message_rules,
    ToolFormat.MISTRAL_ARGS: text_rules,
}


def output_grammar(
    tool_choice: ToolChoice,
    tool_format: ToolFormat,
    reasoning: Reasoning,
    *,
    specials: Mapping[str, int] | None = None,
    answer: str = "",
    tags: Tags = THINK,
) -> str:
    """Returns the grammar of a whole output: of its calls, if there are tools, and of its answer.

    specials: token ids, by spelling, for those words of the format and the tags that are special tokens of the model
    answer: the grammar of the output's text, if the client asked for structured output
    tags: the texts that open and close reasoning

    Raises Unprocessable, which names a function's parameters or, if the functions together are too large, `tools`.
    """

    def composed(choice: ToolChoice) -> str:
        if tool_format in RULES:
            lines = RULES[tool_format](choice, reasoning, specials or {}, bool(answer))
        else:
            lines = _Tagged(choice, tool_format, reasoning, specials or {}, tags).lines(bool(answer))
        return grammar_builder.composed("\n".join(lines), "tools" if choice.functions else ANSWER, answer)

    try:
        return composed(tool_choice)
    except Unprocessable:  # names the function, or drops what only llguidance finds out it cannot enforce
        known = [
            replace(one, parameters=grammar_builder.enforceable(one.parameters, one.param, lenient=not one.strict))
            if one.name in tool_choice.callable_names
            else one
            for one in tool_choice.functions
        ]
        if all(made.parameters is one.parameters for made, one in zip(known, tool_choice.functions, strict=True)):
            raise
    return composed(replace(tool_choice, functions=tuple(known)))


class _Tagged:
    """Writes the grammar of a format whose reasoning and calls stand in the text."""

    def __init__(
        self, tool_choice: ToolChoice, tool_format: ToolFormat, reasoning: Reasoning, specials: Specials, tags: Tags
    ) -> None:
        self._functions = tool_choice.callable_functions
        self._names = [function.name for function in tool_choice.functions]
        self._mode = tool_choice.mode if self._functions else Mode.NONE
        self._syntax = SYNTAX.get(tool_format)
        self._parallel = tool_choice.parallel and not (self._syntax and self._syntax.single)
        self._reasoning = reasoning
        self._specials = specials
        self._opening, self._closing = tags
        self._rules = Rules(specials)

    def lines(self, has_answer: bool) -> list[str]:
        """Returns all rules. has_answer: whether the text keeps to the grammar `@answer`"""
        lines = [self._start(has_answer), *self._reasoning_rules()]
        if self._syntax and self._functions:
            lines += self._call_rules(self._syntax)
        if self._mode is not Mode.REQUIRED and not has_answer:
            lines += self._text_rules(self._syntax)
        return lines + self._rules.lines

    def _start(self, has_answer: bool) -> str:
        lead = {Reasoning.DONE: "", Reasoning.OPEN: "think GAP", Reasoning.UNDECIDED: "(think GAP)?"}[self._reasoning]
        match self._mode, has_answer:
            case Mode.REQUIRED, _:
                return f"start: {lead} calls"
            case Mode.AUTO, True:
                return f"start: {lead} (calls | @answer)"
            case Mode.NONE, True:
                return f"start: {lead} @answer"
        return {
            Reasoning.DONE: "start: rest", Reasoning.OPEN: "start: think rest",
            Reasoning.UNDECIDED: "start: think rest | first",
        }[self._reasoning]  # fmt: skip

    # reasoning

    def _reasoning_rules(self) -> list[str]:
        if self._reasoning is Reasoning.DONE:
            return []
        thought = self._rules.until(self._closing)
        opening = words(self._opening, self._specials, before=r"\s*")
        if self._reasoning is Reasoning.OPEN:
            rule = f"think: {thought}"
        elif "<[" in opening or self._closing in self._specials:
            rule = f"think: {opening} {thought}"
        else:
            rule = rf"think[lazy]: /\s*{escaped(self._opening)}{ANY}{escaped(self._closing)}/"
        return [rule, r"GAP: /\n*/"]

    def _no_reasoning(self) -> str:
        """Returns a condition to append to a terminal, so that its text cannot begin with reasoning."""
        return rf" & ~/\s*{escaped(self._opening)}{ANY}/"

    # calls

    def _call_rules(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns the rule `calls` and the rules that it uses. `section` matches calls without the tag before them."""
        arguments = [argument_rules(syntax, one, self._rules) for one in self._functions]
        tail = words(syntax.tail, self._specials)
        kinds = {"fun": f"{syntax.opening} ", "next": f"{syntax.between} "}
        lines = []
        for kind, before in kinds.items():
            heads = [self._heads(syntax, before, function) for function in self._functions]
            bodies = [f"{head} {arguments[i]} {tail}" for i, head in enumerate(heads)]
            lines.append(f"{kind}: " + " | ".join(bodies))
        more = "next*" if self._parallel and self._several(syntax) else ""
        lines.append(f"section: {self._mark(syntax)} fun {more} {words(syntax.closing, self._specials)}")
        if not syntax.tag:
            return [*lines, "calls: section"]
        again = rf"(/\n{{0,2}}/ {self._tag(syntax)} section)*" if self._parallel and not self._several(syntax) else ""
        return [*lines, f"calls: {self._tag(syntax)} section {again}"]

    def _several(self, syntax: ToolCallSyntax) -> bool:
        """Whether several calls share one opening word and one closing word."""
        return bool(syntax.opening or syntax.between)

    def _heads(self, syntax: ToolCallSyntax, before: str, function: Function) -> str:
        """Returns the alternatives for what precedes a function's arguments, without the tag."""
        after = W if syntax.form is Form.JSON else ""
        mark = syntax.mark if syntax.needs_mark and before.strip() == syntax.opening else ""
        heads = [f"{'' if mark in self._specials else mark} {before}{head}" for head in syntax.heads]
        if syntax.tag and before.strip() == syntax.opening:
            heads = [head.strip().removeprefix(syntax.tag) for head in heads]
        return f"({' | '.join(words(head, self._specials, function.name, after=after) for head in heads)})"

    def _mark(self, syntax: ToolCallSyntax) -> str:
        if syntax.mark not in self._specials:
            return ""
        return f"<[{self._specials[syntax.mark]}]>" + "?" * (not syntax.needs_mark)

    def _tag(self, syntax: ToolCallSyntax) -> str:
        return words(syntax.tag, self._specials, before="")

    # text

    def _text_rules(self, syntax: ToolCallSyntax | None) -> list[str]:
        """Returns the rules for unconstrained text with calls in it: `rest`, and `first` for an output that might begin
        with reasoning and does not."""
        if syntax is None:
            return ["rest: END", "first: END_FIRST", f"END: /{ANY}/", f"END_FIRST: END{self._no_reasoning()}"]
        if not syntax.tag:
            return self._text_or_calls(syntax)
        if syntax.tag in self._specials:
            rest = f"TEXT ({self._tag(syntax)} section TEXT){'*' if self._parallel else '?'}" * bool(self._functions)
            first = rest.replace("TEXT", "FIRST", 1)
            return [f"rest: {rest or 'TEXT'}", f"first: {first or 'FIRST'}", f"TEXT: /{ANY}/",
                    f"FIRST: TEXT{self._no_reasoning()}"]  # fmt: skip
        tag = escaped(syntax.tag)
        last = [f"END: /{ANY}/ & ~/{ANY}{tag}{ANY}/", f"END_FIRST: END{self._no_reasoning()}"]
        if not self._functions:
            return ["rest: END", "first: END_FIRST", *last]
        return [
            f"rest: (tool section){'*' if self._parallel else '?'} END",
            f"first: tool_first section {'(tool section)*' if self._parallel else ''} END | END_FIRST",
            "tool[lazy]: TOOL", "tool_first[lazy]: TOOL_FIRST",
            f"TOOL: /{ANY}{tag}/", f"TOOL_FIRST: TOOL{self._no_reasoning()}", *last,
        ]  # fmt: skip

    def _text_or_calls(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns the rules for an output that is text or calls. Text that begins as a call must be a call."""
        calls = "calls |" if self._functions else ""
        beginnings = f"({'|'.join(self._beginnings(syntax))})"
        return [
            f"rest: {calls} SAID", f"first: {calls} SAID_FIRST",
            rf"SAID: /{ANY}/ & ~/\s*{beginnings}{ANY}/", f"SAID_FIRST: SAID{self._no_reasoning()}",
        ]  # fmt: skip

    def _beginnings(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns regexes of the texts with which only a call begins."""
        names = either(self._names)
        marks = [escaped(syntax.mark)] if syntax.needs_mark else []
        mark = rf"({escaped(syntax.mark)}\s*)?" if syntax.mark and not syntax.needs_mark else ""
        found = []
        for head in syntax.heads:
            before, _, after = f"{syntax.opening} {head}".partition("NAME")
            regex = r"\s*".join(escaped(word) for word in before.split())
            if before.endswith(" ") and regex:
                regex += r"\s*"
            quote = '"' if after.startswith('"') else r"\s*" + {Form.PYTHON: r"\(", Form.JSON: r"\{"}[syntax.form]
            found.append(f"{mark}{regex}{names}{quote}")
        return marks + found
