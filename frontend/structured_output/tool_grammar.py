"""The grammar of an output with reasoning or tool calls, in llguidance's Lark:
https://github.com/guidance-ai/llguidance

Reasoning is unconstrained. Text that begins as a call must become a call of an offered function, with arguments that
the function's schema allows. The text around calls is unconstrained, unless a call is required. Where calls may drift
(`output_parser/drift.py`), text that has begun one in another form must become a call, too, and a call may end the
reasoning. Without `strict`, schema keywords that cannot be enforced are ignored. In any output that the grammar
accepts, `parser` finds the same calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser import model_format
from frontend.output_parser.drift import MOST_WITHIN_THOUGHT, DriftForm, drift_forms, names_within
from frontend.output_parser.model_format import (
    THINK,
    Function,
    Mode,
    Reasoning,
    Tags,
    ToolChoice,
    ToolFormat,
    check_specials,
)
from frontend.output_parser.tool_syntax import SYNTAX, Form, ToolCallSyntax
from frontend.request import report_dropped
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.lark_in_json import Unsupported, in_json
from frontend.structured_output.tool_arguments import (
    ANY,
    Rules,
    Specials,
    W,
    argument_rules,
    either,
    escaped,
    object_of_input,
    spaced,
    words,
)

# The grammar of an output in harmony, in llguidance's Lark. frontend/output_parser/harmony.py
# reads all such outputs.
#
# The whole output is a sequence of messages, each of a kind that the request allows: reasoning, text before a call, a
# call or the answer at the end. Only content is unconstrained.


def message_rules(
    tool_choice: ToolChoice, reasoning: Reasoning, specials: Mapping[str, int], has_answer: bool
) -> list[str]:
    """Returns the rules of an output.

    reasoning: where the output begins: before a message's header, within an answer (DONE) or within reasoning (OPEN)
    specials: the ids of the marks, by their spelling
    has_answer: whether the answer keeps to the grammar `@answer`

    Raises Unprocessable if the vocabulary lacks one of harmony's special tokens.
    """
    check_specials(model_format.HARMONY, specials, tool_choice)
    functions, required = tool_choice.callable_functions, tool_choice.mode is Mode.REQUIRED
    text = "@answer" if has_answer else "TEXT"
    earlier = "thought" if required or has_answer else "(thought | preamble)"
    last = ["call"] * bool(functions) + ["final"] * (not required)
    begins = {
        Reasoning.UNDECIDED: "messages",
        Reasoning.OPEN: "TEXT m_end next messages",
        Reasoning.DONE: "TEXT m_end next messages" if required else text,
    }[reasoning]
    return [
        f"start: {begins}",
        f"messages: ({earlier} next)* ({' | '.join(last)})",
        'thought: m_channel "analysis" m_message TEXT m_end',
        'preamble: m_channel "commentary" m_message TEXT m_end',
        f'final: m_channel "final" m_message {text}',
        'next: m_start "assistant"',
        "TEXT: /(?s:.*)/",
        *_harmony_call_rules(functions),
        *[f"m_{spelling[2:-2]}: <[{id}]>" for spelling, id in specials.items()],
    ]


def _harmony_call_rules(functions: list[Function]) -> list[str]:
    """Returns the rule `call`. A model writes the recipient after or before the channel, and may leave the type out."""
    if not functions:
        return []
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        lines += [
            f"call_{i}: (m_channel AFTER_{i} | BEFORE_{i} m_channel CHANNEL) type? m_message args_{i} m_call",
            rf"AFTER_{i}: /commentary to=functions\.{function.name}( (json)?)?/",
            rf"BEFORE_{i}: / to=functions\.{function.name}/",
            f"args_{i}: {_whole_arguments(function)}",
        ]
    return [*lines, "CHANNEL: /commentary( (json)?)?/", 'type: m_constrain "json"']


def _whole_arguments(function: Function) -> str:
    """Returns the expression of arguments that are one JSON object."""
    if function.custom is not None and function.custom.part:
        return object_of_input(function.custom.part)
    return f"%json {grammar_builder.embedded(function.parameters, function.param, lenient=not function.strict)}"


def mistral_text_rules(
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
    return lines + _mistral_call_rules(functions, specials, tool_choice.parallel)


def _mistral_call_rules(functions: list[Function], specials: Mapping[str, int], parallel: bool) -> list[str]:
    if not functions:
        return []
    id = f"(<[{specials['[CALL_ID]']}]> ID)?" if "[CALL_ID]" in specials else ""
    lines = ["calls: call+" if parallel else "calls: call", "ID: /[A-Za-z0-9]{9}/"]
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        lines += [
            f'call_{i}: <[{specials["[TOOL_CALLS]"]}]> "{function.name}" {id} <[{specials["[ARGS]"]}]> args_{i}',
            f"args_{i}: {_whole_arguments(function)}",
        ]
    return lines


BLANKS = r"\s{0,8}"  # before reasoning: a model that repeats itself could otherwise write them for ever
ANSWER = "response_format"
# The forms of calls in which the grammar of a custom tool's input is not enforced, by its syntax.
LOSES = {"lark": (Form.TAGS, Form.PYTHON, Form.BARE), "regex": (Form.TAGS, Form.BARE)}
# The bool: whether the answer has a grammar.
RulesOf = Callable[[ToolChoice, Reasoning, Mapping[str, int], bool], list[str]]
# The formats whose reasoning and calls are not tagged text.
RULES: Mapping[ToolFormat, RulesOf] = {
    ToolFormat.HARMONY: message_rules,
    ToolFormat.MISTRAL_ARGS: mistral_text_rules,
}


def output_grammar(
    tool_choice: ToolChoice,
    tool_format: ToolFormat,
    reasoning: Reasoning,
    *,
    specials: Mapping[str, int] | None = None,
    answer: str = "",
    tags: Tags = THINK,
    drifts: bool = False,
) -> str:
    """Returns the grammar of a whole output: of its calls, if there are tools, and of its answer.

    specials: token ids, by spelling, for those words of the format and the tags that are special tokens of the model
    answer: the grammar of the output's text, if the client asked for structured output
    tags: the texts that open and close reasoning
    drifts: whether calls in other forms than the format's count, in an output whose text is free

    Raises Unprocessable, which names a function's parameters or, if the functions together are too large, `tools`.
    """

    tool_choice, parts = _with_inputs(tool_choice, tool_format)

    def composed(choice: ToolChoice) -> str:
        if tool_format in RULES:
            lines = RULES[tool_format](choice, reasoning, specials or {}, bool(answer))
        else:
            free = drifts and choice.mode is Mode.AUTO and not answer
            lines = _Tagged(choice, tool_format, reasoning, specials or {}, tags, free).lines(bool(answer))
        return grammar_builder.composed("\n".join(lines), "tools" if choice.functions else ANSWER, answer, parts)

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


def _with_inputs(tool_choice: ToolChoice, tool_format: ToolFormat) -> tuple[ToolChoice, dict[str, str]]:
    """Returns the choice with a name for each Lark grammar of a custom tool that is enforced, and these grammars.

    Reports the grammars that are not enforced. Raises Unprocessable for one that is invalid.
    """
    if all(one.custom is None or not one.custom.syntax for one in tool_choice.functions):
        return tool_choice, {}
    form = SYNTAX[tool_format].form if tool_format in SYNTAX else Form.JSON
    functions, parts = list(tool_choice.functions), dict[str, str]()
    for i, one in enumerate(functions):
        if one.custom is None:
            continue
        if one.custom.syntax == "lark":
            text = grammar_builder.lark_text(grammar_builder.lark(one.custom.definition, one.custom.param))
            try:
                quoted = in_json(text) if form is Form.JSON else ""
            except Unsupported as reason:
                report_dropped({one.custom.param: str(reason)})
                continue
            if quoted and one.name in tool_choice.callable_names:
                functions[i] = replace(one, custom=replace(one.custom, part=f"input_{i}"))
                parts[f"input_{i}"] = quoted
        if one.custom.syntax and form in LOSES[one.custom.syntax]:
            report_dropped({one.custom.param: "a text without JSON's quotes keeps to no grammar"})
    return replace(tool_choice, functions=tuple(functions)), parts


class _Tagged:
    """Writes the grammar of a format whose reasoning and calls stand in the text."""

    def __init__(
        self, tool_choice: ToolChoice, tool_format: ToolFormat, reasoning: Reasoning, specials: Specials, tags: Tags,
        drifts: bool,
    ) -> None:  # fmt: skip
        self._functions = tool_choice.callable_functions
        self._names = [function.name for function in tool_choice.functions]
        self._mode = tool_choice.mode if self._functions else Mode.NONE
        self._syntax = SYNTAX.get(tool_format)
        self._parallel = tool_choice.parallel and not (self._syntax and self._syntax.single)
        self._reasoning = reasoning
        self._specials = specials
        self._opening, self._closing = tags
        self._rules = Rules(specials)
        self._drifts = drift_forms(tool_format) if drifts and self._functions else ()

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
        thinks = f"think rest{self._thought_calls()}"
        return {
            Reasoning.DONE: "start: rest", Reasoning.OPEN: f"start: {thinks}",
            Reasoning.UNDECIDED: f"start: {thinks} | first",
        }[self._reasoning]  # fmt: skip

    # reasoning

    def _reasoning_rules(self) -> list[str]:
        if self._reasoning is Reasoning.DONE:
            return []
        thought = self._thought()
        opening = words(self._opening, self._specials, before=BLANKS)
        if self._reasoning is Reasoning.OPEN:
            rule = f"think: {thought}"
        elif "<[" in opening or self._closing in self._specials:
            rule = f"think: {opening} {thought}"
        else:
            rule = rf"think[lazy]: /{BLANKS}{escaped(self._opening)}{ANY}{escaped(self._closing)}/"
        return [rule, r"GAP: /\n{0,8}/"]

    def _thought(self) -> str:
        """Returns the expression of reasoning up to the tag that closes it. A call within it is not a part of it."""
        found = "|".join(self._thought_leads(self._callable))
        if not found or self._closing not in self._specials:
            return self._rules.until(self._closing)
        text = self._rules.add("TEXT", f"/{ANY}/ & ~/({found}){ANY}/")
        return f"{text} <[{self._specials[self._closing]}]>"

    def _thought_calls(self) -> str:
        """Returns alternatives to `think rest`: outputs with a call that ends the reasoning; empty if there are none.
        Such a call has the format's own form, and its tag is special or begins a line."""
        syntax = self._syntax
        if not (self._drifts and syntax and syntax.tag):
            return ""
        opening = words(self._opening, self._specials, before=BLANKS) if self._reasoning is Reasoning.UNDECIDED else ""
        as_text = bool(opening) and "<[" not in opening and self._closing not in self._specials
        before, opening = (f"{BLANKS}{escaped(self._opening)}", "") if as_text else ("", opening)
        again = rf"(/{W}/ {self._tag(syntax)} section)*" if self._parallel else ""
        is_special = self._closing in self._specials
        closing = f"({again} /{W}/ <[{self._specials[self._closing]}]>)?" if is_special else ""
        if syntax.tag in self._specials:
            open_end = "" if is_special else f" & ~/{ANY}{escaped(self._closing)}{ANY}/"
            calls = [f"{self._rules.add('TEXT', f'/{before}{ANY}/{open_end}')} {self._tag(syntax)} section"]
        else:
            blanks = f"/{W}/" if syntax.form is Form.JSON else ""
            more = "next*" if self._parallel and self._several(syntax) else ""
            end = words(syntax.closing, self._specials)
            calls = [
                f"{self._lazy(before + regex)} {blanks} {body} {more} {end}"
                for function, body in zip(self._functions, self._bodies(syntax), strict=True)
                for regex in self._thought_leads(escaped(function.name))
            ]
        return "".join(f" | {opening} {call} {closing} {'rest' if self._parallel else 'last'}" for call in calls)

    def _thought_leads(self, names: str) -> list[str]:
        """Returns regexes of reasoning up to the arguments of a call, for a format whose tag is text.

        names: a regex of the functions' names
        """
        syntax = self._syntax
        if not (self._drifts and syntax and syntax.tag) or syntax.tag in self._specials:
            return []
        if len(self._functions) > MOST_WITHIN_THOUGHT:
            return []
        heads = [f"{syntax.opening} {head}" for head in syntax.heads if names_within(head)]
        return [rf"({ANY}\n)?\s*{spaced(head, names)}" for head in heads]

    def _no_reasoning(self) -> str:
        """Returns a condition to append to a terminal, so that its text cannot begin with reasoning."""
        return rf" & ~/\s*{escaped(self._opening)}{ANY}/"

    # calls

    def _call_rules(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns the rule `calls` and the rules that it uses. `section` matches calls without the tag before them."""
        kinds = {"fun": f"{syntax.opening} ", "next": f"{syntax.between} "}
        bodies, lines = self._bodies(syntax), []
        for kind, before in kinds.items():
            heads = [self._heads(syntax, before, function) for function in self._functions]
            lines.append(f"{kind}: " + " | ".join(f"{head} {body}" for head, body in zip(heads, bodies, strict=True)))
        more = "next*" if self._parallel and self._several(syntax) else ""
        lines.append(f"section: {self._mark(syntax)} fun {more} {words(syntax.closing, self._specials)}")
        if not syntax.tag:
            return [*lines, "calls: section"]
        again = rf"(/\n{{0,2}}/ {self._tag(syntax)} section)*" if self._parallel and not self._several(syntax) else ""
        return [*lines, f"calls: {self._tag(syntax)} section {again}"]

    def _bodies(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns the expression of each function's arguments and of what follows them."""
        tail = words(syntax.tail, self._specials)
        return [f"{argument_rules(syntax, one, self._rules)} {tail}" for one in self._functions]

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
        if self._drifts:
            return self._drifting_text(syntax)
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

    # text with calls in other forms than the format's

    def _drifting_text(self, syntax: ToolCallSyntax) -> list[str]:
        """Returns the same rules as `_text_rules`, for text in which calls may have other forms, too.

        Text goes up to where a form's name begins. There, either the name of a function and what leads on to its
        arguments follow, which begins a call, or text that does not begin so. All forms of text are few, however many
        functions there are.
        """
        no_own = "" if syntax.tag else rf" & ~/\s*({'|'.join(self._beginnings(syntax))}){ANY}/"
        no_thought = self._no_reasoning()
        after = "rest" if syntax.tag else "more"
        calls = "" if syntax.tag else "calls | "
        lines = [
            f"{'rest' if syntax.tag else 'more'}: {self._text(syntax, '')}",
            f"middle: {self._text(syntax, f' & ~/{self._certain()}{ANY}/', within=True)}",
            *self._named(after if self._parallel else "last"),
        ]
        if not syntax.tag:
            lines.append(f"rest: calls | {self._text(syntax, no_own)}")
        if self._reasoning is Reasoning.UNDECIDED:
            lines.append(f"first: {calls}{self._text(syntax, no_own + no_thought)}")
        if not self._parallel:
            lines.append(f"last: {self._text(syntax, '', ends=True)}")
            lines.append(f"last_middle: {self._text(syntax, f' & ~/{self._certain()}{ANY}/', within=True, ends=True)}")
        return lines

    def _text(self, syntax: ToolCallSyntax, condition: str, *, within: bool = False, ends: bool = False) -> str:
        """Returns the alternatives for text, and for what follows it.

        condition: what the text must not be, too
        within: whether the text begins within a line
        ends: whether no call may follow
        """
        openings = [_opening_regex(forms, within) for forms in self._alike()]
        own = [f"{ANY}{escaped(syntax.tag)}"] * bool(syntax.tag and syntax.tag not in self._specials)
        plain = self._rules.add("TEXT", f"/{ANY}/ & ~/({'|'.join([*openings, *own])}){ANY}/{condition}")
        found = [plain]
        if syntax.tag in self._specials and not ends:
            found.append(f"{plain} {self._tag(syntax)} section {'rest' if self._parallel else 'last'}")
        elif syntax.tag and not ends:
            found.append(f"{self._lazy(own[0], condition)} section {'rest' if self._parallel else 'last'}")
        for number, opening in enumerate(openings):
            found.append(f"{self._lazy(opening, condition)} {'last_middle' if ends else f'named_{number}'}")
        return " | ".join(found)

    def _named(self, after: str) -> list[str]:
        """Returns the rules for what follows each form's opening. after: the rule of what follows a call"""
        lines = []
        for number, forms in enumerate(self._alike()):
            form, found = forms[0], ["middle"]
            ends = [f"<[{self._specials[word]}]>" for word in form.closings[-1] if word in self._specials]
            end = rf"(/[ \n]{{0,2}}/ ({' | '.join(ends)}))?" if ends else ""
            blanks = f"/{W}/" if form.arguments.form is Form.JSON else ""
            for function in self._functions:
                arguments = argument_rules(form.arguments, function, self._rules)
                name = f"/{escaped(function.name)}{_after_name(form)}/"
                found.append(f"{name} {blanks} {arguments} {words(form.tail, self._specials)} {end} {after}")
            lines.append(f"named_{number}: {' | '.join(found)}")
        return lines

    def _certain(self) -> str:
        """Returns a regex of what makes a call certain where a form's name begins."""
        return f"{self._callable}({'|'.join(_after_name(forms[0]) for forms in self._alike())})"

    def _alike(self) -> list[list[DriftForm]]:
        """Returns the forms in groups that the grammar does not need to tell apart, because their calls are alike."""
        groups: dict[object, list[DriftForm]] = {}
        for form in self._drifts:
            groups.setdefault((form.head, form.tail, form.arguments.form), []).append(form)
        return list(groups.values())

    def _lazy(self, regex: str, condition: str = "") -> str:
        """Adds a rule that matches a text up to the first place where the regex does; returns its name."""
        body = self._rules.add("LEAD", f"/{regex}/{condition}") if condition else f"/{regex}/"
        return self._rules.add("lead", body, "[lazy]")

    @property
    def _callable(self) -> str:
        """A regex of the names of the functions that may be called."""
        return either(function.name for function in self._functions)

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


def _opening_regex(forms: list[DriftForm], within: bool) -> str:
    """Returns a regex of all texts that end where the name of a call in one of these forms begins.

    forms: forms with the same head; within: whether the text begins within a line, where no form begins
    """
    openings = [spaced(opening, "") for form in forms for opening in form.openings if opening]
    line = rf"{ANY}\n\s*" if within else rf"({ANY}\n)?\s*"
    lead = rf"{line}({'|'.join(openings)})\s*" if openings else line
    bare = r"|\s*" if any(form.bare for form in forms) and not within else ""
    return f"(({lead}{bare}){_head_regexes(forms[0])[0]})"


def _after_name(form: DriftForm) -> str:
    """Returns a regex of what stands between the name and the arguments."""
    return _head_regexes(form)[1]


def _head_regexes(form: DriftForm) -> tuple[str, str]:
    """Returns regexes of what precedes and what follows the name in a form's head."""
    head = ""
    for part in form.head:
        texts = [(r"\s*" if head else "") + spaced(text, "NAME") for text in part if text]
        head += f"({'|'.join(texts)}){'?' * ('' in part)}"
    before, _, after = head.partition("NAME")
    return _balanced(before), _balanced(after)


def _balanced(regex: str) -> str:
    """Closes or opens the group that a cut through a regex has left open."""
    open_ = regex.count("(") - regex.count(r"\(") - regex.count(")") + regex.count(r"\)")
    return regex + ")" * open_ if open_ > 0 else "(" * -open_ + regex


async def answer_grammar(
    tool_choice: ToolChoice, begins: Reasoning, text_grammar: str, specials: Mapping[str, int], context: ModelContext
) -> str:
    """Returns the grammar of a whole answer, whose text must match `text_grammar`. If it is "", the text is free.

    specials: ids of the special tokens of the model's output format

    If a call is forced, `text_grammar` has no effect, because such an answer has no text.
    """
    style = context.style
    answer = "" if tool_choice.mode is Mode.REQUIRED else text_grammar
    return await grammar_builder.in_thread(
        partial(
            output_grammar, tool_choice, style.tool_format, begins,
            specials=specials, answer=answer, tags=style.tags, drifts=style.drifts,
        )
    )  # fmt: skip


async def check_parameters(functions: Sequence[Function]) -> None:
    """Checks the schemas of functions as an answer does, on routes that only count or render. Raises Unprocessable."""
    if functions:
        await grammar_builder.in_thread(partial(_check_parameters, functions))


def _check_parameters(functions: Sequence[Function]) -> str:
    for one in functions:
        if one.custom is not None and one.custom.syntax == "lark":
            grammar_builder.lark(one.custom.definition, one.custom.param)
        grammar_builder.supported(one.parameters, one.param, lenient=not one.strict)
    return ""
