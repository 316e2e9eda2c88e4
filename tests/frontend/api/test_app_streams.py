"""Streams over real sockets: the official SDK, clients that leave or read slowly, failures in mid-stream."""

import asyncio
import json

import httpx
import openai
import pytest
from starlette.types import Message

from frontend.errors import Overloaded
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.serving import Raw, app_over, serving, until
from tests.patience import PATIENCE_S

BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 100}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_now([text], False)[0]


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_sdk_stream_joins_to_the_complete_response(tokenizer: Tokenizer) -> None:
    pieces = [encode(tokenizer, text) for text in ("Hello", " the", " €uro")]
    pool = FakePool(sending(*pieces, outcome=Outcome.LENGTH, pause_s=0.002))
    async with serving(app_over(pool, tokenizer)) as url, sdk(url) as client:
        whole = await client.completions.create(model=MODEL, prompt="abc", max_tokens=100, seed=5)
        stream = await client.completions.create(
            model=MODEL, prompt="abc", max_tokens=100, seed=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].text == "Hello the €uro"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert pool.aborted == []


async def test_sdk_receives_several_prompts_and_choices(tokenizer: Tokenizer) -> None:
    def play(pool: FakePool, stream: Stream) -> None:
        pool.send_tokens(stream, encode(tokenizer, f"#{stream.id}"))
        pool.end(stream, Outcome.LENGTH)

    async with serving(app_over(FakePool(play), tokenizer)) as url, sdk(url) as client:
        answer = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=9)
    assert [choice.text for choice in answer.choices] == ["#1", "#2", "#3", "#4"]


async def test_sdk_raises_refusals(tokenizer: Tokenizer) -> None:
    pool = FakePool(refusals={0: Overloaded("full", code="queue_full", retry_after=1.0)})
    async with serving(app_over(pool, tokenizer)) as url, sdk(url) as client:
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt="")
        with pytest.raises(openai.InternalServerError) as full:
            await client.completions.create(model=MODEL, prompt="a", max_tokens=4)
    assert refused.value.param == "temperature" and full.value.status_code == 503


async def test_sdk_raises_a_failure_in_mid_stream(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending(encode(tokenizer, "half"), outcome=Outcome.ERROR, error="the step failed"))
    async with serving(app_over(pool, tokenizer)) as url, sdk(url) as client:
        got = []
        with pytest.raises(openai.APIError, match="the step failed"):
            async for chunk in await client.completions.create(model=MODEL, prompt="a", max_tokens=9, stream=True):
                got.append(chunk.choices[0].text)
    assert got == ["half"]


@pytest.mark.parametrize(("stream_format", "marker"), [("openai", "[DONE]"), ("events", "event: done")])
async def test_failed_stream_ends_with_an_error_event(tokenizer: Tokenizer, stream_format: str, marker: str) -> None:
    pool = FakePool(sending(encode(tokenizer, "half"), outcome=Outcome.SHUTDOWN))
    async with serving(app_over(pool, tokenizer)) as url, httpx.AsyncClient() as http:
        body = BODY | {"stream": True, "stream_format": stream_format}
        answer = await http.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200 and marker not in answer.text and '"finish_reason":"' not in answer.text
    last = answer.text.strip().rsplit("\n\n", 1)[-1]
    assert "error" in json.loads(last.rsplit("data: ", 1)[1]) and "shutting down" in last


async def test_internal_error_in_mid_stream_is_an_error_event(tokenizer: Tokenizer) -> None:
    def play(pool: FakePool, stream: Stream) -> None:
        pool.later(lambda: pool.send_tokens(stream, encode(tokenizer, "a")))
        pool.later(lambda: pool.send_tokens(stream, ["no id"]), 0.05)  # type: ignore[list-item]

    async with serving(app_over(FakePool(play), tokenizer)) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/v1/completions", json=BODY | {"stream": True})
    assert answer.text.count("data: ") == 2 and '"type":"internal_error"' in answer.text and "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_has_its_request_aborted(tokenizer: Tokenizer, stream: bool) -> None:
    pool = FakePool()
    app = app_over(pool, tokenizer)
    async with serving(app) as url:
        client = await Raw.post(url, "/v1/completions", BODY | {"stream": stream, "n": 2})
        await until(lambda: len(pool.submitted) == 2)
        pool.send_tokens(pool.submitted[0].stream, encode(tokenizer, "a"))
        await asyncio.sleep(0.02)
        assert pool.aborted == []
        await client.leave()
        await until(lambda: sorted(pool.aborted) == [1, 2])
        assert app.state.models.first.service.generations == set()


async def test_client_that_leaves_before_admission_has_its_request_cancelled(tokenizer: Tokenizer) -> None:
    pool = FakePool(delays={0: 60.0})
    async with serving(app_over(pool, tokenizer)) as url:
        client = await Raw.post(url, "/v1/completions", BODY)
        await until(lambda: pool.calls == 1)
        others = len(asyncio.all_tasks())
        await client.leave()
        await until(lambda: len(asyncio.all_tasks()) < others)
    assert pool.submitted == []


async def test_deltas_for_a_slow_client_become_one(tokenizer: Tokenizer) -> None:
    pool, gate = FakePool(), asyncio.Event()
    written: list[bytes] = []

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()
        return asked.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            written.append(message["body"])
            await gate.wait()  # simulates a full socket

    asked: list[Message] = [{"type": "http.request", "body": json.dumps(BODY | {"stream": True}).encode()}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    serving = asyncio.create_task(app_over(pool, tokenizer)(scope, receive, send))
    await until(lambda: pool.submitted)
    stream = pool.submitted[0].stream
    for letter in "abcdefgh":
        pool.send_tokens(stream, encode(tokenizer, letter))
        await asyncio.sleep(0.002)
    pool.end(stream, Outcome.LENGTH)
    assert len(written) == 1
    gate.set()
    await serving
    chunks = [json.loads(line[6:]) for line in b"".join(written).splitlines() if line.startswith(b"data: {")]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["a", "bcdefgh", ""]


async def test_silent_stream_sends_keep_alive_comments(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with serving(app_over(pool, tokenizer, keepalive_s=0.05)) as url:
        client = await Raw.post(url, "/v1/completions", BODY | {"stream": True})
        heard = await asyncio.wait_for(client.reader.readuntil(b": keep-alive\n\n"), PATIENCE_S)
        assert b"200 OK" in heard
        pool.send_tokens(pool.submitted[0].stream, encode(tokenizer, "a"))
        pool.end(pool.submitted[0].stream, Outcome.LENGTH)
        rest = await asyncio.wait_for(client.reader.readuntil(b"data: [DONE]\n\n"), PATIENCE_S)
        await client.leave()
    assert b'"text":"a"' in rest


async def test_tokens_of_one_arrival_are_one_write(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with serving(app_over(pool, tokenizer)) as url:
        client = await Raw.post(url, "/v1/completions", BODY | {"stream": True, "stream_format": "events"})
        await until(lambda: pool.submitted)
        await client.reader.readuntil(b"\r\n\r\n")
        for id in encode(tokenizer, "abcdef"):
            pool.send_tokens(pool.submitted[0].stream, [id])
        size = int(await client.reader.readline(), 16)  # one chunk of the transfer encoding
        piece = (await client.reader.readexactly(size)).decode()
        await client.leave()
    assert piece.count("event: token\n") == len(encode(tokenizer, "abcdef"))


async def test_drain_fails_unfinished_requests_with_an_error(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    app = app_over(pool, tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        slow = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
        whole = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: len(pool.submitted) == 2)
        draining = asyncio.create_task(app.state.models.drain(0.1))
        await asyncio.sleep(0.02)
        ready, refused = await http.get("/ready"), await http.post("/v1/completions", json=BODY)
        assert (ready.status_code, ready.json()["reason"], refused.status_code) == (503, "draining", 503)
        assert (await http.get("/stats")).json()["draining"] is True
        await draining
        text, answer = (await slow).text, await whole
    assert "shutting down" in text and "[DONE]" not in text
    assert answer.status_code == 503
