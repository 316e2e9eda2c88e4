"""The scanner of JSON objects finds the end of any object, completes any beginning, and stops at invalid JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.json_arguments import JsonObjectScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 1]), st.booleans(), st.integers(0, 500))
def test_scanner_finds_the_end_and_closes_any_beginning(
    value: dict[str, object], indent: int | None, ascii: bool, at: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    whole = JsonObjectScanner()
    assert (whole.feed(text + "} rest"), whole.rest, whole.done) == (text, "} rest", True)
    part = JsonObjectScanner()
    given = part.feed(text[: min(at, len(text) - 1)])
    assert not part.done and not part.broken and given + part.held == text[: min(at, len(text) - 1)]
    closed = json.loads(part.closed(given))
    assert closed.keys() <= value.keys() and list(value)[: len(closed)] == list(closed)
    assert part.feed(text[min(at, len(text) - 1) :]) and part.done


@pytest.mark.parametrize(
    "text", ["[", '{"a": 1,}', '{"a": [1,]}', "{,", '{"a" 1', '{"a": 01}', '{"a": tru}', '{"a": "\\x', '{"a": "\n',
             '{"a": "\\u00g', '{"a": 1]', '{"a": {"b": 2}}'[:-2] + "]", '{1: 2', '{"a": }', '{"a": [,']
)  # fmt: skip
def test_scanner_of_invalid_json_breaks(text: str) -> None:
    for cut in range(len(text)):
        scan = JsonObjectScanner()
        released = scan.feed(text[:cut])
        if not scan.broken:
            released += scan.feed(text[cut:])
        assert scan.broken and not scan.done
        json.loads(scan.closed(released))
