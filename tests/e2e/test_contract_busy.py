"""The HTTP contract of a server that is full and then drains, and whose default stream is typed events."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.contract import CHAT, COMPLETIONS, LEAST, MESSAGES
from tests.e2e.server import Events, Server, read_events, serving
from tests.patience import PATIENCE_S

TOKENS = 40
LONG = {"model": "m", "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
PLACES = 4  # one running request and three waiting ones


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-batch-size", "1", "--max-waiting-requests", "3", "--completions-stream-format", "events"]
    with serving("demo", tmp_path_factory.mktemp("busy") / "log", *flags, held=True) as server:
        yield server


def ask(server: Server, route: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + route, json=LEAST[route] | fields, timeout=PATIENCE_S)


def refused(server: Server, code: str) -> None:
    """Checks the refusal in every API format, streamed and not. Refusals come before a stream begins."""
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


def test_queue_overflow_is_refused_and_admitted_requests_complete(server: Server) -> None:
    def one(i: int) -> Events:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            return read_events(client, LONG)

    with ThreadPoolExecutor(40) as pool, server.hold.at(TOKENS // 2):
        crowd = [pool.submit(one, i) for i in range(40)]
        first = [future.result() for future in islice(as_completed(crowd, PATIENCE_S), 40 - PLACES)]
        assert {answer.status for answer in first} == {503}
        server.hold.release()
        answers = [future.result(PATIENCE_S) for future in crowd]
    assert {answer.status for answer in answers} == {200, 503}
    texts = {answer.text for answer in answers if answer.status == 200}
    assert len(texts) == 1 and all(len(a.ids) == TOKENS for a in answers if a.status == 200)
    server.until_idle()


def test_drain_of_full_server_completes_admitted_requests(server: Server) -> None:
    """The running request is held halfway until every refusal has been checked.

    The test ends the server, so it is the last test of its module.
    """
    family = psutil.Process(server.process.pid).children(recursive=True)

    def long() -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json=LONG, timeout=PATIENCE_S)

    with ThreadPoolExecutor(PLACES) as pool, server.hold.at(TOKENS // 2):
        admitted = [pool.submit(long)]
        server.until(lambda stats: stats["running"] == 1)  # until then, it has one of the three places to wait
        admitted += [pool.submit(long) for _ in range(PLACES - 1)]
        server.until(lambda stats: (stats["running"], stats["waiting"]) == (1, 3))
        refused(server, "queue_full")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda stats: stats["draining"])
        refused(server, "draining")
        ready, health = (httpx.get(server.url + path, timeout=PATIENCE_S) for path in ("/ready", "/health"))
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (health.status_code, health.json()) == (200, {"status": "ok", "model_loaded": True})
        server.hold.release()
        told = [said.result().text.strip().split("\n\n") for said in admitted]
    for *tokens, end in told:
        name, data = end.split("\n")
        assert name == "event: done" and json.loads(data.removeprefix("data: "))["usage"]["completion_tokens"] == TOKENS
        assert sum(event.startswith("event: token\n") for event in tokens) == TOKENS
    assert server.process.wait(timeout=PATIENCE_S) == 0
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
