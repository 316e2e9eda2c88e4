"""bench/peers/images.py with fake servers that answer at once, cache images, or refuse."""

import json
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.client.server import BenchError
from bench.peers import images
from bench.peers.images import compare, first_token, image, main

ANSWERS_S, ENCODES_S = 0.01, 0.1


class Clock:
    """Replaces the clock of the measurement, which only the fake servers move, however slow the machine is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time_ns = time.time_ns

    def perf_counter(self) -> float:
        return self.now


@contextmanager
def serving(
    *chunks: dict[str, object], status: int = 200, encodes_s: float = 0.0, clock: Clock | None = None
) -> Iterator[str]:
    """Yields the address of a fake server that streams `chunks`, and takes `encodes_s` seconds for each new image."""
    seen, passing = set(), clock or Clock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin(200)
            self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            shown = body["messages"][0]["content"][0]["image_url"]["url"]
            passing.now += ANSWERS_S if shown in seen else ANSWERS_S + encodes_s
            seen.add(shown)
            self._begin(status)
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self, code: int) -> None:
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ROLE = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
TOKEN = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}


def test_second_question_of_a_server_that_keeps_images_is_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(images, "time", clock)
    with serving(ROLE, TOKEN, clock=clock) as fast, serving(ROLE, TOKEN, encodes_s=ENCODES_S, clock=clock) as slow:
        table = compare(Namespace(urls=[fast, slow], sides=["224"], rounds=3))
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    first, second = (next(row for row in rows if row[0] == f"224², {which}") for which in ("first", "second"))
    assert float(first[3]) > float(second[3]) and float(first[2]) >= ENCODES_S > float(second[2])


def test_answer_without_a_token_and_refusal_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ROLE) as empty, pytest.raises(BenchError, match="ended an answer without a token"):
        first_token(empty, "m", image(64, 0), "What?")
    with serving(status=400) as refusing:
        assert main([refusing, "--sides", "224"]) == 1
    assert "does not answer: HTTP Error 400" in capsys.readouterr().err
    assert main(["http://127.0.0.1:1"]) == 1 and main(["x", "--sides", "7"]) == 2


def test_images_differ_by_seed_and_are_small() -> None:
    assert image(1024, 0) == image(1024, 0) != image(1024, 1)
    assert len(image(1024, 0)) < 100_000
