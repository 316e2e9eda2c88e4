"""Runs `sluice` commands in this process, and an HTTP server that answers from a script."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli import main
from tests.patience import PATIENCE_S

Reply = tuple[int, bytes]


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "delta": {"content": text}}]}).encode()


def says(*texts: str, end: bytes = b"data: [DONE]") -> Reply:
    role = b'data: {"choices":[{"delta":{"role":"assistant"}}]}'
    return 200, b"\n\n".join([b": a comment", role, *map(chunk, texts), b'data: {"choices":[]}', end, b""])


def refuses(status: int, message: str) -> Reply:
    return status, json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


@dataclass
class ScriptedServer:
    """Answers each POST with the next reply, and records the requests."""

    replies: list[Reply]
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)  # the last reply ends when this event is set
    holding: bool = False
    models: bytes = b'{"data": [{"id": "first"}, {"id": "second"}]}'


@contextmanager
def scripted_server(*replies: Reply, holding: bool = False) -> Iterator[ScriptedServer]:
    server = ScriptedServer(list(replies), holding=holding)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            server.keys.append(self.headers["Authorization"])
            self._reply(200, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body))
            self._reply(*server.replies.pop(0))
            if server.holding and not server.replies:
                self.wfile.flush()
                server.hold.wait(PATIENCE_S)

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        server.hold.set()
        listener.shutdown()
        thread.join()
        listener.server_close()


def sluice(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main.main(argv)
    return code, *capsys.readouterr()


def feed_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
