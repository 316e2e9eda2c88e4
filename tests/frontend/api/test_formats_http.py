"""Both chat formats over HTTP: the table of errors in each envelope, and the official SDKs over real sockets."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from frontend.errors import Overloaded, SluiceError
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.api.harness import fold_chat, fold_message_events, parse_events, parse_sse
from tests.frontend.serving import app_over, http_client, serving

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_now([text], False)[0]


def says(tokenizer: Tokenizer, *texts: str, outcome: Outcome = Outcome.EOS, error: str = "") -> FakePool:
    return FakePool(sending(*[encode(tokenizer, text) for text in texts], outcome=outcome, error=error, pause_s=0.002))


# The table of errors

ROWS: list[tuple[bytes, int, str, str]] = [
    (b"{", 400, "invalid_request_error", "invalid_request_error"),
    (json.dumps(ASKED | {"messages": []}).encode(), 400, "invalid_request_error", "invalid_request_error"),
    (json.dumps(ASKED | {"temperature": -1}).encode(), 400, "invalid_request_error", "invalid_request_error"),
    (json.dumps(ASKED | {"stop_token_ids": [999]}).encode(), 400, "invalid_request_error", "invalid_request_error"),
    (json.dumps(ASKED | {"model": "x"}).encode(), 404, "invalid_request_error", "not_found_error"),
    (b" " * 1000, 413, "invalid_request_error", "request_too_large"),
]


@pytest.mark.parametrize(("content", "status", "openai_kind", "anthropic_kind"), ROWS)
async def test_refusals_in_both_envelopes(
    tokenizer: Tokenizer, content: bytes, status: int, openai_kind: str, anthropic_kind: str
) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer, max_body_bytes=999) as http:
        chat, messages = [await http.post(path, content=content) for path in (CHAT, MESSAGES)]
    assert (chat.status_code, messages.status_code, pool.calls) == (status, status, 0)
    in_openais_words(chat, openai_kind)
    in_anthropics_words(messages, anthropic_kind)


NESTED = json.loads('{"a":' * 900 + "1" + "}" * 900)
DEEP_BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ASKED | {"chat_template_kwargs": {"a": NESTED}}),
    (CHAT, ASKED | {"tools": [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]}),
    (MESSAGES, ASKED | {"tools": [{"name": "f", "input_schema": NESTED}]}),
    (
        "/v1/responses",
        {"model": MODEL, "input": "a", "tools": [{"type": "function", "name": "f", "parameters": NESTED}]},
    ),
    ("/tokenize", ASKED | {"chat_template_kwargs": NESTED}),
]


@pytest.mark.parametrize(("path", "body"), DEEP_BODIES)
@pytest.mark.parametrize("depth", [900, 100_000])
async def test_body_that_is_nested_deeply_is_no_server_error(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], depth: int
) -> None:
    text, nested = json.dumps(body), json.dumps(NESTED)
    content = text.replace(nested, '{"a":' * depth + "1" + "}" * depth)
    async with http_client(FakePool(), tokenizer, unknown_fields="ignore") as http:
        answer = await http.post(path, content=content)
    assert answer.status_code in (400, 422), answer.text
    if depth == 100_000:
        assert "nested too deeply" in answer.text


def in_openais_words(answer: httpx.Response, kind: str) -> None:
    error = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert error["type"] == kind


def in_anthropics_words(answer: httpx.Response, kind: str) -> None:
    told = answer.json()
    assert set(told) == {"type", "error", "request_id"} and set(told["error"]) == {"type", "message"}
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == answer.headers["x-request-id"]


async def test_routes_and_methods(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        missing = await http.post("/v1/messages/foo")
        assert missing.status_code == 404
        in_anthropics_words(missing, "not_found_error")
        for path in (MESSAGES, "/v1/messages/count_tokens"):
            wrong = await http.get(path)
            assert wrong.status_code == 405
            in_anthropics_words(wrong, "not_found_error")
        wrong = await http.get(CHAT)
        assert wrong.status_code == 405
        in_openais_words(wrong, "not_found_error")
        in_openais_words(await http.post("/v1/messagesfoo"), "not_found_error")


async def test_keys_in_either_header(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one\n")
    (tmp_path / "keys").chmod(0o600)
    async with http_client(says(tokenizer, "hello"), tokenizer, api_keys=str(tmp_path / "keys")) as http:
        none = await http.post(MESSAGES, json=ASKED)
        assert none.status_code == 401
        in_anthropics_words(none, "authentication_error")
        in_openais_words(await http.post(CHAT, json=ASKED), "authentication_error")
        in_anthropics_words(await http.post("/v1/messages/count_tokens", json=ASKED), "authentication_error")
        for header in ({"x-api-key": "sk-one"}, {"authorization": "Bearer sk-one"}):
            assert (await http.post(MESSAGES, json=ASKED, headers=header)).status_code == 200
            assert (await http.post(CHAT, json=ASKED, headers=header)).status_code == 200


async def test_overload_and_our_own_mistakes(tokenizer: Tokenizer) -> None:
    def broken(pool: FakePool, stream: object) -> None:
        raise ZeroDivisionError("secret")

    full: dict[int, SluiceError] = {i: Overloaded("full", code="queue_full", retry_after=2.1) for i in range(2)}
    for pool, status, chat_kind, messages_kind in (
        (FakePool(refusals=full), 503, "overloaded_error", "overloaded_error"),
        (FakePool(readiness=not_ready("worker lost")), 503, "overloaded_error", "overloaded_error"),
        (FakePool(broken), 500, "internal_error", "api_error"),
        (says(tokenizer, "a", outcome=Outcome.ERROR), 500, "internal_error", "api_error"),
    ):
        async with http_client(pool, tokenizer) as http:
            chat, messages = [await http.post(path, json=ASKED) for path in (CHAT, MESSAGES)]
        assert (chat.status_code, messages.status_code) == (status, status)
        assert all(("retry-after" in answer.headers) is (status == 503) for answer in (chat, messages))
        in_openais_words(chat, chat_kind)
        in_anthropics_words(messages, messages_kind)
        assert "secret" not in chat.text + messages.text


async def test_counting_needs_no_worker(tokenizer: Tokenizer) -> None:
    pool = says(tokenizer, "x")
    counted = {key: ASKED[key] for key in ("model", "messages")}
    async with http_client(pool, tokenizer) as http:
        usage = (await http.post(MESSAGES, json=ASKED)).json()["usage"]
        pool.readiness = not_ready("worker lost")
        count = await http.post("/v1/messages/count_tokens", json=counted)
        refused = await http.post("/v1/messages/count_tokens", json=counted | {"messages": "x"})
    assert count.json() == {"input_tokens": usage["input_tokens"]}
    in_anthropics_words(refused, "invalid_request_error")


# Streams, assembled by a client, equal whole answers


@pytest.mark.parametrize("more", [
    {}, {"stop": ["lo w"]}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "stop": "€", "logprobs": True},
], ids=str)  # fmt: skip
async def test_chat_streams_fold_to_whole_answers(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    async with http_client(scored(tokenizer), tokenizer) as http:
        whole = (await http.post(CHAT, json=ASKED | more)).json()
        asked = ASKED | more | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, end = parse_sse((await http.post(CHAT, json=asked)).text)
    folded = fold_chat(chunks)
    assert end == "[DONE]" and without_names(folded) == without_names(whole)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        {"lo w": "hel", "€": "hello w"}.get("".join(more.get("stop", "")), "hello w€")
    ] * more.get("n", 1)
    for choice in whole["choices"] if "logprobs" in more else []:
        told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
        assert told == "hello w€", "every generated token, those of the stop too"


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [([], "hello w€", "end_turn"), (["lo w", "zzz"], "hel", "stop_sequence"), (["€"], "hello w", "stop_sequence")],
)
async def test_messages_streams_fold_to_whole_answers(
    tokenizer: Tokenizer, stops: list[str], text: str, reason: str
) -> None:
    async with http_client(scored(tokenizer), tokenizer) as http:
        whole = (await http.post(MESSAGES, json=ASKED | {"stop_sequences": stops})).json()
        asked = ASKED | {"stop_sequences": stops, "stream": True}
        events = parse_events((await http.post(MESSAGES, json=asked)).text)
    assert without_names(fold_message_events(events)) == without_names(whole)
    assert whole["content"] == [{"type": "text", "text": text}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stops[0] if stops else None)


def scored(tokenizer: Tokenizer) -> FakePool:
    """Every sequence has the same output, with log-probabilities if the request asks for them."""
    pieces = [encode(tokenizer, text) for text in ("hel", "lo w", "€")]

    def play(pool: FakePool, stream: Any) -> None:
        def step(i: int) -> None:
            asked = stream.submit.sampling.logprobs
            if asked is not None:
                pool.send_logprobs(stream, len(stream.output), [-0.5] * len(pieces[i]), k=asked)
            pool.send_tokens(stream, pieces[i])
            if i == len(pieces) - 1:
                pool.end(stream)
            else:
                pool.later(lambda: step(i + 1))

        pool.later(lambda: step(0))

    return FakePool(play)


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


# The official SDKs


def openai_sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_sdk(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def test_openais_sdk_streams_and_folds_to_the_whole(tokenizer: Tokenizer) -> None:
    pool = says(tokenizer, "Hello", " the", " €uro")
    async with serving(app_over(pool, tokenizer)) as url, openai_sdk(url) as sdk:
        whole = await sdk.chat.completions.create(**ASKED)
        async with sdk.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
            folded = await stream.get_final_completion()
    assert whole.choices[0].message.content == folded.choices[0].message.content == "Hello the €uro"
    assert whole.choices[0].finish_reason == folded.choices[0].finish_reason == "stop"
    assert whole.usage == folded.usage and folded.choices[0].message.role == "assistant"


async def test_anthropics_sdk_streams_and_folds_to_the_whole(tokenizer: Tokenizer) -> None:
    pool = says(tokenizer, "Hello", " the", " €uro", outcome=Outcome.LENGTH)
    async with serving(app_over(pool, tokenizer)) as url, anthropic_sdk(url) as sdk:
        whole = await sdk.messages.create(**ASKED)
        async with sdk.messages.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream]
            folded = await stream.get_final_message()
        count = await sdk.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    text, again = whole.content[0], folded.content[0]
    assert text.type == again.type == "text" and text.text == again.text == "Hello the €uro"
    assert whole.stop_reason == folded.stop_reason == "max_tokens"
    assert whole.usage == folded.usage and count.input_tokens == whole.usage.input_tokens
    assert [kind for kind in kinds if kind not in ("content_block_delta", "text")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def chat_texts(url: str, got: list[str]) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        for chunk in sdk.chat.completions.create(**ASKED, stream=True):
            got.append(chunk.choices[0].delta.content or "")


def messages_texts(url: str, got: list[str]) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as sdk:
        for event in sdk.messages.create(**ASKED, stream=True):
            got.append(event.delta.text if event.type == "content_block_delta" else "")


async def chat_texts_async(url: str, got: list[str]) -> None:
    async with openai_sdk(url) as sdk:
        async for chunk in await sdk.chat.completions.create(**ASKED, stream=True):
            got.append(chunk.choices[0].delta.content or "")


async def messages_texts_async(url: str, got: list[str]) -> None:
    async with anthropic_sdk(url) as sdk, sdk.messages.stream(**ASKED) as stream:
        async for text in stream.text_stream:
            got.append(text)


CLIENTS: list[tuple[Callable[..., Any], type[Exception]]] = [
    (chat_texts, openai.APIError), (chat_texts_async, openai.APIError),
    (messages_texts, anthropic.APIStatusError), (messages_texts_async, anthropic.APIStatusError),
]  # fmt: skip


@pytest.mark.parametrize(("read", "error"), CLIENTS)
async def test_a_failure_in_mid_stream_raises(
    tokenizer: Tokenizer, read: Callable[..., Any], error: type[Exception]
) -> None:
    pool = says(tokenizer, "half", outcome=Outcome.ERROR, error="the step failed")
    got: list[str] = []
    async with serving(app_over(pool, tokenizer)) as url:
        with pytest.raises(error, match="the step failed"):
            await (read(url, got) if asyncio.iscoroutinefunction(read) else asyncio.to_thread(read, url, got))
    assert "".join(got) == "half"


@pytest.mark.parametrize(("path", "ends"), [(CHAT, ["[DONE]", '"finish_reason":"']), (MESSAGES, ["message_stop"])])
async def test_a_failed_stream_has_no_good_end(tokenizer: Tokenizer, path: str, ends: list[str]) -> None:
    pool = says(tokenizer, "half", outcome=Outcome.SHUTDOWN)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(path, json=ASKED | {"stream": True})
    assert answer.status_code == 200 and answer.text.rstrip().endswith("}") and "half" in answer.text
    assert not [end for end in ends if end in answer.text]
    error = json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]
    assert error["type"] == "overloaded_error" and "shutting down" in error["message"]


async def test_the_sdks_raise_what_was_refused(tokenizer: Tokenizer) -> None:
    async with serving(app_over(FakePool(), tokenizer)) as url:
        async with anthropic_sdk(url) as sdk:
            with pytest.raises(anthropic.BadRequestError, match="`temperature`"):
                await sdk.messages.create(**ASKED, extra_body={"temperature": -1})
            with pytest.raises(anthropic.BadRequestError, match="`messages`"):
                await sdk.messages.create(**ASKED | {"messages": []})
        async with openai_sdk(url) as other:
            with pytest.raises(openai.BadRequestError) as refused:
                await other.chat.completions.create(**ASKED, extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"
