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
from tests.e2e.server import Server, serving

LONG = {"model": "m", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    flags = ["--max-batch-size", "1", "--max-waiting-requests", "3", "--completions-stream-format", "events"]
    flags += ["--speculation", "off"]  # with it the long requests, which repeat themselves, would not be long
    with serving("demo", tmp_path / "log", *flags) as server:
        yield server


def refused(server: Server, code: str) -> None:
    """In every envelope, streamed or not, before any stream has begun."""
    for stream in (False, True):
        for route, more in ((COMPLETIONS, {"stream_format": "openai"}), (CHAT, {})):
            said = httpx.post(server.url + route, json=LEAST[route] | more | {"stream": stream})
            error = overloaded(said)["error"]
            assert (error["type"], error["code"], error["param"]) == ("overloaded_error", code, None)
        said = httpx.post(server.url + MESSAGES, json=LEAST[MESSAGES] | {"stream": stream})
        assert overloaded(said)["error"]["type"] == "overloaded_error"
        told = overloaded(httpx.post(server.url + COMPLETIONS, json=LEAST[COMPLETIONS] | {"stream": stream}))
        assert list(told) == ["error"] and isinstance(told["error"], str)


def overloaded(said: httpx.Response) -> dict[str, Any]:
    assert said.status_code == 503 and int(said.headers["retry-after"]) >= 1
    return dict(said.json())


def test_full_then_draining_and_who_was_admitted_is_served(server: Server) -> None:
    def long() -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json=LONG, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        admitted = [pool.submit(long) for _ in range(4)]
        server.until(lambda stats: (stats["running"], stats["waiting"]) == (1, 3))
        refused(server, "queue_full")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda stats: stats["draining"])
        refused(server, "draining")
        ready, health = httpx.get(server.url + "/ready"), httpx.get(server.url + "/health")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "model_loaded": True})
        ends = [said.result().text.strip().split("\n\n")[-1] for said in admitted]
    for end in ends:
        name, data = end.split("\n")
        assert name == "event: done" and json.loads(data.removeprefix("data: "))["usage"]["completion_tokens"] == 1900
    assert server.process.wait(timeout=40) == 0
