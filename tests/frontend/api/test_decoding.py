"""Decoding a body into its type, by msgspec and by the readers in Python."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.decoding import decode, reader
from frontend.api.openai import completions
from frontend.api.openai.completions_input import CompletionRequest
from frontend.api.openapi import REQUESTS
from frontend.api.request_model import RequestModel, fields_of, type_info
from frontend.api.request_schema import request_schema
from frontend.errors import BadRequest, Unprocessable
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import (
    JSON,
    parse,
)


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> GenerationRequest:
    return await parse(completions, dict(fields), context(tokenizer))


async def test_integer_field_written_as_a_float_is_read_as_an_integer(tokenizer: Tokenizer) -> None:
    written = {"max_tokens": 8.0, "top_k": 7e0, "seed": -1.0, "min_tokens": -0.0, "stop_token_ids": [4.0]}
    plain = {"max_tokens": 8, "top_k": 7, "seed": -1, "min_tokens": 0, "stop_token_ids": [4]}
    assert (await parsed(tokenizer, body(**written))) == (await parsed(tokenizer, body(**plain)))
    with pytest.raises(Unprocessable):
        await parsed(tokenizer, body(max_tokens=1e30))


NO_OBJECTS = [b"", b"{", b"[]", b"5", b'"x"', b"null", b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 99999]


@pytest.mark.parametrize("raw", NO_OBJECTS)
def test_decode_of_no_json_object_is_400(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        decode(raw, CompletionRequest)


@settings(deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_decode_of_any_body_gives_a_request_or_a_refusal(raw: bytes) -> None:
    """Only an object can be well-formed and not acceptable (422)."""
    try:
        assert isinstance(decode(raw, CompletionRequest), CompletionRequest)
    except BadRequest as refused:
        assert refused.status == 400
    except Unprocessable as refused:
        assert refused.status == 422 and isinstance(json.loads(raw), dict)


HELLO = [{"role": "user", "content": "a"}]


REQUIRED: dict[str, Any] = {
    "model": "a",
    "prompt": "a",
    "messages": HELLO,
    "input": "a",
    "max_tokens": 1,
    "tokens": [1],
}


def properties() -> dict[str, tuple[type[RequestModel], str]]:
    """Every field of every request once for each schema that it has."""
    found: dict[tuple[str, str], tuple[type[RequestModel], str]] = {}
    for kind in REQUESTS.values():
        for name, shape in request_schema(kind)["properties"].items():
            found.setdefault((name, repr(shape)), (kind, name))
    return {f"{kind.__name__}.{name}": (kind, name) for kind, name in found.values()}


FIELDS = properties()


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


BLOCKS = (
    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "1"},
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}], "is_error": True},
    {"type": "thinking", "thinking": "", "signature": "x"},
)


ITEMS = (
    {"type": "function_call", "call_id": "1", "name": "f"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    {"type": "message", "role": "tool", "content": "a"},
    {"type": "item_reference", "id": "1"},
)


LIKELY = st.sampled_from(  # values near the borders of what fields take
    [
        *(-(2**63) - 1, -(2**63), 2**64 - 1, 2**64, -100, -101, -2, -1, 0, 1, 2, 3, 20, 21, 100, 128, 129),
        *(0.5, -0.1, 1.1, 2.1, 100.5, "", "a", "text", "none", "openai", "auto", True, False),
        *([], [1], ["a"], [""], [0.5], [[1]], [[]], ["a", [1]], [1, "a"], [-1], ["x"] * 17, ["text"], [None]),
        *({}, {"5": 1}, {"5": 101}, {"a": 1}, {"12345678901": 1}, {"type": "text"}, {"type": "none"}),
        *({"type": "disabled"}, {"include_usage": True}, {"include_usage": None}, {"include_usage": 1}, {"other": 1}),
        *([{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": ""}]}]),
        *([{"role": "tool", "content": "a", "tool_call_id": "x", "name": None}], [{"role": "user"}]),
        *([{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": []}], [{"role": "tool"}]),
        *([{"role": role, "content": "", "tool_calls": [CALL]}] for role in ("user", "assistant")),
        *([{"role": role, "content": [block]}] for role in ("user", "assistant") for block in BLOCKS),
        *({"type": kind, **more} for kind in ("tool", "any", "function") for more in ({}, {"name": "f"})),
        *([{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}] for kind in ("object", 1)),
        *([item] for item in ITEMS),
        *([{"type": "function", "name": "f", "strict": strict}] for strict in (None, True, 1)),
        *(
            {"effort": "low", "summary": None},
            {"effort": "much"},
            {"verbosity": "medium"},
            {"format": {"type": "text"}},
        ),
        *([{"name": "f", "input_schema": {}}], [{"name": "a b", "input_schema": {}}], [{"type": "x"}], "required"),
        *({"type": "function", "function": {"name": "f"}}, {"type": "enabled", "budget_tokens": 1}),
        *([{"role": "user", "content": [{"type": "image", "text": ""}]}], [{"role": "user", "content": []}]),
        *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}, {"regex": "a"}),
        *({"type": "json_schema", "json_schema": {"name": "a"}}, {"type": "json_schema", "schema": {}}),
        *([{"type": "text", "text": "a"}], [{"type": "text"}], [{"role": "wizard", "content": "a"}]),
    ]
)


def smallest(kind: type[RequestModel]) -> dict[str, Any]:
    return {name: REQUIRED[name] for name, field in fields_of(kind).items() if field.required}


def plain(value: Any) -> bool:
    """JSON as it comes over HTTP, where 1.0 is no integer: JSON Schema alone sees none in that."""
    match value:
        case list():
            return all(map(plain, value))
        case dict():
            return all(map(plain, value.values()))
        case float():
            return math.isfinite(value) and not value.is_integer()
        case _:
            return True


@pytest.mark.parametrize("name", FIELDS)
def test_msgspec_and_readers_give_the_same_request(name: str) -> None:
    """msgspec's, and the reading in Python of what it refuses."""
    kind, field = FIELDS[name]

    @settings(deadline=None, max_examples=30, database=None)
    @given((LIKELY | JSON).filter(plain))
    def agree(value: Any) -> None:
        body = {**smallest(kind), field: value}
        try:
            fast = msgspec.json.decode(msgspec.json.encode(body), type=kind)
        except msgspec.ValidationError:
            return
        assert fast == reader(type_info(kind))(body, "") == decode(msgspec.json.encode(body), kind)

    agree()
