"""The HTTP contract of a server that cannot take more: full, then draining; and of one that speaks typed events."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.contract import CHAT, COMPLETIONS, LEAST, MESSAGES
from tests.e2e.held import Hold
from tests.e2e.server import PATIENCE_S, Server, serving

TOKENS = 40
LONG = {"model": "m", "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return Hold(tmp_path / "hold")


@pytest.fixture
def server(tmp_path: Path, hold: Hold) -> Iterator[Server]:
    flags = ["--max-batch-size", "1", "--max-waiting-requests", "3", "--completions-stream-format", "events"]
    with serving("demo", tmp_path / "log", *flags, entry=hold.entry) as server:
        yield server


def ask(server: Server, route: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + route, json=LEAST[route] | fields, timeout=PATIENCE_S)


def refused(server: Server, code: str) -> None:
    """In every envelope, streamed or not, before any stream has begun."""
    for stream in (False, True):
        for route, more in ((COMPLETIONS, {"stream_format": "openai"}), (CHAT, {})):
            said = ask(server, route, more | {"stream": stream})
            error = overloaded(said)["error"]
            assert (error["type"], error["code"], error["param"]) == ("overloaded_error", code, None)
        said = ask(server, MESSAGES, {"stream": stream})
        assert overloaded(said)["error"]["type"] == "overloaded_error"
        told = overloaded(ask(server, COMPLETIONS, {"stream": stream}))
        assert list(told) == ["error"] and isinstance(told["error"], str)


def overloaded(said: httpx.Response) -> dict[str, Any]:
    assert said.status_code == 503 and int(said.headers["retry-after"]) >= 1
    return dict(said.json())


def test_full_then_draining_and_who_was_admitted_is_served(server: Server, hold: Hold) -> None:
    """The one that runs is held in its middle until everything that is refused meanwhile has been asked."""

    def long() -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json=LONG, timeout=PATIENCE_S)

    with ThreadPoolExecutor(4) as pool, hold.at(TOKENS // 2):
        admitted = [pool.submit(long) for _ in range(4)]
        server.until(lambda stats: (stats["running"], stats["waiting"]) == (1, 3))
        refused(server, "queue_full")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda stats: stats["draining"])
        refused(server, "draining")
        ready, health = (httpx.get(server.url + path, timeout=PATIENCE_S) for path in ("/ready", "/health"))
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "model_loaded": True})
        hold.release()
        ends = [said.result().text.strip().split("\n\n")[-1] for said in admitted]
    for end in ends:
        name, data = end.split("\n")
        assert name == "event: done" and json.loads(data.removeprefix("data: "))["usage"]["completion_tokens"] == TOKENS
    assert server.process.wait(timeout=PATIENCE_S) == 0
