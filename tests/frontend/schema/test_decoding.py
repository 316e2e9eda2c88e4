"""Decoding a body into its type, by msgspec and by the readers in Python."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.openai import completions
from frontend.api.openai.completions import CompletionRequest
from frontend.errors import BadRequest, Unprocessable
from frontend.request import GenerationRequest
from frontend.schema.base import type_info
from frontend.schema.decoding import MOST_CONTAINERS, MOST_STRINGS, check_values, decode, reader, refuse_unknown
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import (
    JSON,
    parse,
)
from tests.frontend.api.request_values import FIELDS, LIKELY, plain, smallest


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
    """Only a body that is a JSON object can be refused with 422."""
    try:
        assert isinstance(decode(raw, CompletionRequest), CompletionRequest)
    except BadRequest as refused:
        assert refused.status == 400
    except Unprocessable as refused:
        assert refused.status == 422 and isinstance(json.loads(raw), dict)


@pytest.mark.parametrize("name", FIELDS)
def test_msgspec_and_readers_give_the_same_request(name: str) -> None:
    """msgspec reads a body first. A body that msgspec refuses is read again in Python, with the same result."""
    kind, field = FIELDS[name]

    @settings(deadline=None, max_examples=15, database=None)
    @given((LIKELY | JSON).filter(plain))
    def agree(value: Any) -> None:
        body = {**smallest(kind), field: value}
        try:
            fast = msgspec.json.decode(msgspec.json.encode(body), type=kind)
        except msgspec.ValidationError:
            return
        assert fast == reader(type_info(kind))(body, "", refuse_unknown) == decode(msgspec.json.encode(body), kind)

    agree()


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"[" + b"[]," * MOST_CONTAINERS + b"1]", "at most 262144 arrays and objects"),
        (b'{"a":[' + b"{}," * MOST_CONTAINERS + b"1]}", "at most 262144 arrays and objects"),
        (b"[" + b"[]," * (MOST_CONTAINERS - 1) + b"1]", ""),
        (b'["' + b"[{" * MOST_CONTAINERS + b'"]', ""),
        (b'["' + b'[\\"{' * MOST_CONTAINERS + b'"]', ""),
        (b'["' + b'[\\"{' * MOST_CONTAINERS, ""),  # not JSON, which the decoder says
        (b"[" + b'"",' * MOST_STRINGS + b'""]', "at most 524288 strings and keys"),
        (b"[" + b'"",' * (MOST_STRINGS - 1) + b'""]', ""),
        (b'{"prompt":[' + b"5," * 2_000_000 + b"5]}", ""),
    ],
)
def test_a_body_has_a_bounded_number_of_values(sent: bytes, problem: str) -> None:
    if not problem:
        check_values(sent)
        return
    with pytest.raises(BadRequest, match=problem):
        check_values(sent)
