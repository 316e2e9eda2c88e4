"""Literals of Python and of Gemma 4 become JSON, however they are cut. test_call_parser.py tests all formats."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.literal_arguments import BARE, PYTHON, Language, LiteralArguments
from tests.frontend.output_parser.joining import cut


def scanned(language: Language, *pieces: str) -> tuple[str, LiteralArguments]:
    scanner, found = LiteralArguments(language), ""
    for i, piece in enumerate(pieces):
        found += scanner.feed(piece)
        if scanner.done or scanner.broken:
            scanner.rest += "".join(pieces[i + 1 :])
            break
    return found, scanner


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
NAMES = st.sampled_from(["a", "b_1", "größe"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, VALUES), st.lists(st.integers(1, 7), max_size=40))
def test_any_python_literals_come_back(values: dict[str, Any], sizes: list[int]) -> None:
    written = "(" + ", ".join(f"{name}={value!r}" for name, value in values.items()) + ")"
    assert all(ast.literal_eval(repr(value)) == value for value in values.values())
    found, scanner = scanned(PYTHON, *cut(f"{written}]", sizes))
    assert scanner.done and scanner.rest == "]" and json.loads(found) == values


def bare(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{name}:{bare(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(bare, value)) + "]"
    return json.dumps(value)


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=9)
BARES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, BARES), st.lists(st.integers(1, 7), max_size=40))
def test_any_bare_literals_come_back(values: dict[str, Any], sizes: list[int]) -> None:
    found, scanner = scanned(BARE, *cut(f"{bare(values)}<tool_call|>", sizes))
    assert scanner.done and scanner.rest == "<tool_call|>" and json.loads(found) == values


@pytest.mark.parametrize(
    ("language", "written", "value"),
    [
        (PYTHON, r"""(a='\x41B\U0001f600\'"\q\/', )""", {"a": "AB😀'\"\\q/"}), (PYTHON, "( a = [ 1 , ] )", {"a": [1]}),
        (PYTHON, "(a=null, b=true)", {"a": None, "b": True}),
        (BARE, "{ a : True , my key:1}", {"a": True, "my key": 1}),
        (BARE, '{<|"|>a<|"|>:{}}', {"a": {}}), (PYTHON, "()", {}), (PYTHON, "(a=r'x')", None), (PYTHON, "(1)", None),
        (PYTHON, "(a=1;", None), (BARE, "{a:b}", None), (PYTHON, "(a=[1}", None), (PYTHON, r"(a='\xzz')", None),
        (BARE, "{a 1}", None), (PYTHON, "(a=01)", None),
    ],
)  # fmt: skip
def test_other_spellings(language: Language, written: str, value: Any) -> None:
    for pieces in ((written,), tuple(written)):
        found, scanner = scanned(language, *pieces)
        assert scanner.broken == (value is None) and scanner.done == (value is not None)
        if value is not None:
            assert json.loads(found) == value


def test_strings_stream_and_numbers_wait_for_their_end() -> None:
    scanner = LiteralArguments(PYTHON)
    assert (
        scanner.feed("(a='x") == '{"a": "x' and scanner.feed("\\") == "" and scanner.feed("n', b=12") == '\\n", "b": '
    )
    assert scanner.held == "12" and scanner.feed("3)") == "123}" and scanner.done
