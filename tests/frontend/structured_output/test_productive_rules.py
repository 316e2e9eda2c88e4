"""Rules of a user's grammar that allow no text that ends."""

import pytest

from frontend.errors import Unprocessable
from frontend.structured_output import grammar as build
from frontend.structured_output.productive_rules import unproductive


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "a" b | "c"\nb: "x" b\n', ["b"]),
        ('start: "a" b? "c"\nb: "x" b\n', ["b"]),
        ('start: "a" (b | "d")\nb: "x" c\nc: "y" b', ["b", "c"]),
        ('start: "a" (("x" b)+ | c)\nb: ("y" b){2,3}\nc: "z"', ["b"]),
        ('start: b\nb: ["x"] b // a note\n  | "y" b', ["start", "b"]),
        ('start: "a" b\nb: "x" b | "y"\n', []),
        ('start: "a" b\nb: "x" (b)* \n', []),
        ('start: "a" b\nb: "x" [b]\n', []),
        ('start: "a" b\nb: "x" b{0,2}\n', []),
        ('start: "a" b\nb: "x" b |\n', []),
        ('start: "a"\nunused: "x" unused\n', []),
        ('%llguidance {}\nstart: WORD b | /[:|(]/\nb: %json {"type": "object"} | "b: x" b\nWORD: "a".."z"\n', []),
        ('start: <unknown> ¿ b\nb: "x" b\n', []),
    ],
)
def test_reachable_rules_without_an_end_are_found(grammar: str, expected: list[str]) -> None:
    assert unproductive(grammar) == expected


@pytest.mark.parametrize("grammar", ['start: "a" b | "c"\nb: "x" b\n', 'root ::= "a" b | "c"\nb ::= "x" b\n'])
def test_grammar_with_a_dead_end_is_refused_by_the_rules_name(grammar: str) -> None:
    with pytest.raises(Unprocessable, match="`grammar` cannot be enforced: no text of these rules ends: `b`"):
        build.lark(grammar, "grammar")


def test_long_chain_of_rules_is_read_in_time() -> None:
    chain = "".join(f'r{i}: "x" r{i + 1}\n' for i in range(9000))
    assert unproductive(f'start: r0\n{chain}r9000: "y"\n') == []
