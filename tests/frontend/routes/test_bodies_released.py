"""Bodies that are no longer needed are not kept while an answer is streamed; those that a record keeps stay counted."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from frontend.observability.recording import _on_one_line
from frontend.routes.verify import _again


async def test_invocations_hand_the_body_on_once_and_keep_nothing() -> None:
    async def disconnected() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    body = b"x" * int("4096")  # not a constant, to which the code has references
    before = sys.getrefcount(body)
    receive = _again(body, Request({"type": "http"}, disconnected))
    assert sys.getrefcount(body) > before
    assert (await receive())["body"] == body
    assert sys.getrefcount(body) == before
    assert (await receive())["type"] == "http.disconnect"


def test_recorded_body_is_on_one_line_without_being_parsed(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "two\nlines", "n": [1, 2]}, indent=2).replace("\n", "\r\n").encode()
    line = msgspec.json.encode({"body": _on_one_line(body)})
    assert b"\n" not in line and b"\r" not in line and json.loads(line)["body"] == json.loads(body)
    assert _on_one_line(b"") is None
