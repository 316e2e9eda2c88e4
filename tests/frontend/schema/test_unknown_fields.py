"""Unknown fields are refused, or ignored and named in a header and once in the log."""

import json
import logging
from typing import Any

import pytest

from frontend.api.openai.chat_request import ChatRequest
from frontend.errors import Unprocessable
from frontend.schema.decoding import UnknownFields, decode
from frontend.server.middleware import MAX_HEADER_CHARS, header_value
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, sending
from tests.frontend.serving import http_client

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi", "shade": None}], "mood": 1}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "shade": 1}], "mood": 1}]},
}
UNKNOWN = {"foo": None, "stream": True, "stream_options": {"bar": 5}}


def pool() -> FakePool:
    return FakePool(sending([104, 105]))


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_at_any_depth_are_ignored_and_told(tokenizer: Tokenizer, path: str) -> None:
    async with http_client(pool(), tokenizer) as http:
        whole = await http.post(path, json=BODIES[path])
        stream = await http.post(path, json=BODIES[path] | UNKNOWN)
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
    nested = {f"{'input' if path == RESPONSES else 'messages'}[].{name}" for name in ("mood", "content[].shade")}
    told = [set(one.headers["x-sluice-ignored-fields"].split(", ")) for one in (whole, stream)]
    assert told == [nested, nested | {"foo", "stream_options.bar"}]


async def test_request_without_unknown_fields_has_no_header(tokenizer: Tokenizer) -> None:
    async with http_client(pool(), tokenizer) as http:
        answer = await http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "n": None})
    assert answer.status_code == 200 and "x-sluice-ignored-fields" not in answer.headers


@pytest.mark.parametrize(("field", "value"), [("web_search_options", {}), ("input_ids", [1, 2])])
async def test_known_field_that_is_not_supported_is_refused_beside_ignored_ones(
    tokenizer: Tokenizer, field: str, value: Any
) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post(CHAT, json=BODIES[CHAT] | {field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_completions_refuse_unknown_fields_by_default_and_all_routes_on_demand(tokenizer: Tokenizer) -> None:
    body = {"model": "tiny", "prompt": "a", "foo": None}
    async with http_client(FakePool(), tokenizer) as http:
        for more in ({}, {"stream_format": "events"}):
            assert (await http.post(COMPLETIONS, json=body | more)).status_code == 422
    async with http_client(FakePool(), tokenizer, unknown_fields="refuse") as http:
        for path in BODIES:
            refused = await http.post(path, json=BODIES[path] | {"foo": 1})
            assert refused.status_code == 400 and "unknown field" in refused.text
    async with http_client(pool(), tokenizer, unknown_fields="ignore") as http:
        answer = await http.post(COMPLETIONS, json=body)
    assert (answer.status_code, answer.headers["x-sluice-ignored-fields"]) == (200, "foo")


def test_each_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = UnknownFields("auto")
    with caplog.at_level(logging.WARNING, "sluice.frontend"):
        for index in range(3):
            policy.reader(CHAT, {})(f"messages[{index}].mood")
        policy.reader(CHAT, {})("other")
    assert [("messages[].mood" in line, "other" in line) for line in caplog.messages] == [(True, False), (False, True)]


def test_names_are_safe_in_a_header() -> None:
    ignored: dict[str, None] = {}
    body = {"messages": [{"role": "user", "content": "hi"}], "a, b\r\nSet-Cookie: x": 1, "größe": 2}
    decode(json.dumps(body).encode(), ChatRequest, UnknownFields("ignore").reader(CHAT, ignored))
    assert header_value(ignored) == "a%2C%20b%0D%0ASet-Cookie%3A%20x, gr%C3%B6%C3%9Fe"


def test_header_has_a_longest_length() -> None:
    value = header_value(dict.fromkeys(f"field_{i}" for i in range(1000)))
    assert len(value) <= MAX_HEADER_CHARS and value.endswith(", ...") and value.startswith("field_0, field_1, ")


def test_strict_path_refuses() -> None:
    with pytest.raises(Unprocessable, match="unknown field `foo`"):
        UnknownFields("auto").reader(COMPLETIONS, {})("foo")
