"""The grammar of an output in harmony, in llguidance's Lark. The parser in harmony.py reads all such outputs.

The whole output is a sequence of messages, each of a kind that the request allows: reasoning, text before a call, a
call or the answer at the end. Only content is unconstrained.
"""

from collections.abc import Mapping

from frontend.output_parser import marks
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice, check_specials
from frontend.text import grammar_builder


def message_rules(
    tool_choice: ToolChoice, reasoning: Reasoning, specials: Mapping[str, int], has_answer: bool
) -> list[str]:
    """Returns the rules of an output.

    reasoning: where the output begins: before a message's header, within an answer (DONE) or within reasoning (OPEN)
    specials: the ids of the marks, by their spelling
    has_answer: whether the answer keeps to the grammar `@answer`

    Raises Unprocessable if the vocabulary lacks one of harmony's special tokens.
    """
    check_specials(marks.HARMONY, specials, tool_choice)
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
        *_call_rules(functions),
        *[f"m_{spelling[2:-2]}: <[{id}]>" for spelling, id in specials.items()],
    ]


def _call_rules(functions: list[Function]) -> list[str]:
    """Returns the rule `call`. A model writes the recipient after or before the channel, and may leave the type out."""
    if not functions:
        return []
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        schema = grammar_builder.embedded(function.parameters, function.param, lenient=not function.strict)
        lines += [
            f"call_{i}: (m_channel AFTER_{i} | BEFORE_{i} m_channel CHANNEL) type? m_message args_{i} m_call",
            rf"AFTER_{i}: /commentary to=functions\.{function.name}( (json)?)?/",
            rf"BEFORE_{i}: / to=functions\.{function.name}/",
            f"args_{i}: %json {schema}",
        ]
    return [*lines, "CHANNEL: /commentary( (json)?)?/", 'type: m_constrain "json"']
