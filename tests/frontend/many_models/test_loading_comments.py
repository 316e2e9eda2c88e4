"""Streams whose model is being loaded: comments in server-sent events, proper ends, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from frontend.server.http_protocol import ConnectionLimits
from shared.config.frontend import FrontendConfig
from tests.frontend.many_models.launched import Launcher, launched
from tests.frontend.serving import Raw, serving, until
from tests.patience import PATIENCE_S

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 9, "stream": True}),
    "typed events": ("/v1/completions", {"prompt": "Hi", "max_tokens": 9, "stream_format": "events"}),
    "responses": ("/v1/responses", {"input": "Hi", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "stream": True}),
    "llama.cpp": ("/completion", {"prompt": "Hi", "n_predict": 9, "stream": True}),
}
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Ollama": ("/api/chat", {"messages": CHAT["messages"], "stream": True}),
    "no stream": ("/v1/chat/completions", CHAT),
}


@asynccontextmanager
async def server(
    factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch, keepalive_s: float
) -> AsyncIterator[tuple[str, Launcher]]:
    limits = ConnectionLimits.of(FrontendConfig())
    async with (
        launched(factory.mktemp("r"), patch, "a", keepalive_s=keepalive_s) as (app, table, launcher),
        serving(app, limits) as url,
    ):
        launcher.tell("a", "unloaded")
        await until(lambda: table.readiness.ready)
        yield url, launcher


async def read(url: str, path: str, body: dict[str, Any], act: Any) -> tuple[httpx.Response, str]:
    """Returns the response and its whole text. Calls `act` when the second comment has arrived."""
    text = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        http.stream("POST", path, json={"model": "a", **body}) as response,
    ):
        async for piece in response.aiter_text():
            text += piece
            if act is not None and text.count(": loading a\n\n") >= 2:
                act = act()
    return response, text


@pytest.mark.parametrize("name", STREAMS)
async def test_comments_come_before_the_events_and_before_a_failure(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = STREAMS[name]
    async with server(tmp_path_factory, monkeypatch, 0.02) as (url, launcher):
        fail = lambda: launcher.tell("a", "failed", reason="no such thing", attempts=1)  # noqa: E731
        response, text = await read(url, path, body, fail)
        assert (response.status_code, response.headers["content-type"][:17]) == (200, "text/event-stream")
        ends = [event for event in text.split("\n\n") if event and event != ": loading a"]
        assert len(ends) == 1 and "no such thing" in ends[0] and "error" in ends[0], "one end, and no success"
        launcher.tell("a", "unloaded", attempts=1)
        response, text = await read(url, path, body, lambda: launcher.tell("a", "loaded", attempts=2))
        lines = [line for line in text.splitlines() if line]
        comments = [line for line in lines if line == ": loading a"]
        assert len(comments) >= 2 and lines[: len(comments)] == comments
        assert "error" not in text.replace('"error":null', "") and "X-Request-Id" in response.headers
        plain = await read(url, path, body, None)
        said = [event for event in text.split("\n\n") if event and event != ": loading a"]
        assert len(said) == len([event for event in plain[1].split("\n\n") if event]), "the same events as without"


@pytest.mark.parametrize("name", SILENT)
async def test_what_is_no_stream_of_events_gets_no_comment_and_a_status(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = SILENT[name]
    async with server(tmp_path_factory, monkeypatch, 0.01) as (url, launcher):
        asked = asyncio.create_task(read(url, path, body, None))
        await launcher.until_wanted("a")
        await asyncio.sleep(0.1)
        launcher.tell("a", "failed", reason="no such thing", attempts=1)
        response, text = await asked
        assert (response.status_code, "loading" in text) == (503, False)


async def test_a_failure_before_the_first_comment_has_a_status(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch, 60.0) as (url, launcher):
        asked = asyncio.create_task(read(url, *STREAMS["chat"], None))
        await launcher.until_wanted("a")
        launcher.tell("a", "failed", reason="no such thing", attempts=1)
        response, text = await asked
        assert (response.status_code, json.loads(text)["error"]["code"]) == (503, "model_failed")


@pytest.mark.parametrize("keepalive_s", [0.01, 60.0])
async def test_a_client_that_leaves_waits_no_longer(
    keepalive_s: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch, keepalive_s) as (url, launcher):
        client = await Raw.post(url, "/v1/chat/completions", {"model": "a", **CHAT, "stream": True})
        await launcher.until_wanted("a")
        await client.leave()
        await until(lambda: launcher.seen.wanted == ())
