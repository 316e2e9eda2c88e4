"""Rules of a user's grammar that allow no text that ends."""

import pytest

from frontend.errors import Unprocessable
from frontend.structured_output import grammar as build
from frontend.structured_output.json_schema import supported
from frontend.structured_output.productive_rules import may_force, read, terminals, unproductive


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
    assert unproductive(read(grammar)) == expected


@pytest.mark.parametrize("grammar", ['start: "a" b | "c"\nb: "x" b\n', 'root ::= "a" b | "c"\nb ::= "x" b\n'])
def test_grammar_with_a_dead_end_is_refused_by_the_rules_name(grammar: str) -> None:
    with pytest.raises(Unprocessable, match="`grammar` cannot be enforced: no text of these rules ends: `b`"):
        build.lark(grammar, "grammar")


def test_long_chain_of_rules_is_read_in_time() -> None:
    chain = "".join(f'r{i}: "x" r{i + 1}\n' for i in range(9000))
    assert unproductive(read(f'start: r0\n{chain}r9000: "y"\n')) == []


@pytest.mark.parametrize(("last", "forced"), [("/[ab]/", False), ("/a+/", True), ("(/[ab]/)*", True)])
def test_long_chain_of_terminals_is_read_in_time(last: str, forced: bool) -> None:
    chain = "".join(f"T{i}: [T{i + 1}]\n" for i in range(12_000))
    assert may_force(read(f"start: T0\n{chain}T12000: {last}")) == forced


def test_terminals_that_repeat_long_ones_are_refused() -> None:
    chain = "".join(f"T{i}: [T{i + 1}]\n" for i in range(12_000))
    grammar = f"start: T0\n{chain}T12000: /[^a]/"
    assert len(terminals(read(f"{grammar}\n".replace("/[^a]/", "/[ab]/")), 0)) == 0
    with pytest.raises(ValueError, match="made of long ones"):
        terminals(read(grammar), 1 << 20)


@pytest.mark.parametrize(("last", "possible"), [({"type": "integer"}, True), ({"$ref": "#/$defs/d0"}, False)])
def test_long_chain_of_definitions_is_read_in_time(last: dict[str, object], possible: bool) -> None:
    count = 4_000
    chain: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": last}
    schema = {"$ref": "#/$defs/d0", "$defs": chain}
    if possible:
        assert supported(schema, "schema", lenient=False).schema["$ref"]
    else:
        with pytest.raises(Unprocessable, match="no value can match it, or none that ends"):
            supported(schema, "schema", lenient=False)
