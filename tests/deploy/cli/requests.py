"""Recorded requests, and a fake server whose answers a function returns."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deploy.cli.http_client import Server, WholeAnswer
from deploy.launcher.child_command import CliError
from shared.record import VERSION, RecordedRequest

PATH = "/v1/completions"


def completion(text: str, index: int = 0, **more: Any) -> str:
    return json.dumps({"id": "x", "choices": [{"index": index, "text": text, "finish_reason": "stop"}], **more})


def recorded(answer: str = "", **fields: Any) -> RecordedRequest:
    began = fields.pop("began", "2026-01-02T03:04:05.000+00:00")
    values = {
        "request_id": "r", "route": PATH, "status": 200, "outcome": "finished", "total_ms": 20.0, "ttft_ms": 10.0,
        "request": {"prompt": "p"}, "seeds": [7], "fingerprint": "fp_old", "answer": answer or completion("hello"),
    }  # fmt: skip
    return RecordedRequest(VERSION, began, **{**values, **fields})


@dataclass
class FakeServer(Server):
    """Answers a body with the result of `play(body)`; if `play` raises an exception, the request fails with it."""

    play: Callable[[dict[str, Any]], str] = lambda body: completion("hello")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = "http://fake"
    names: list[str] = field(default_factory=lambda: ["new", "also-new"])

    def models(self) -> list[str]:
        return self.names

    def ask(self, path: str, body: Any) -> WholeAnswer:
        self.bodies.append(body)
        return WholeAnswer(self.play(body), {"x-sluice-fingerprint": "fp_new"}, 0.0)


def refuse(body: dict[str, Any]) -> str:
    raise CliError("full (HTTP 503)", 1)
