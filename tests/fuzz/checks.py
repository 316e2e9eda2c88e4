"""What must be true of any answer to any request that the description allows, or nearly."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema_rs import Draft202012Validator
from schemathesis import Case, CheckContext, Response
from schemathesis.specs.openapi import checks

STREAM = "text/event-stream"
RESPONSE_ENDS = {"response.completed", "response.incomplete", "response.failed"}
CHECKS: list[Any] = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def no_fault(context: CheckContext, response: Response, case: Case) -> None:
    """Busy and too late are answers; anything else from 500 on is our fault."""
    assert response.status_code < 500 or response.status_code in (503, 504), response.text


def events_conform(document: Mapping[str, Any]) -> Callable[[CheckContext, Response, Case], None]:
    """A stream's every event is one that is described, and there is exactly one end."""
    validators = {
        path: Draft202012Validator({**content[STREAM]["x-event-data"], "components": document["components"]})
        for path, item in document["paths"].items()
        if STREAM in (content := item.get("post", {}).get("responses", {}).get("200", {}).get("content", {}))
    }

    def check(context: CheckContext, response: Response, case: Case) -> None:
        if not response.headers.get("content-type", [""])[0].startswith(STREAM):
            return
        *parts, rest = response.content.decode().split("\n\n")
        assert not rest, "the stream is cut off"
        told = list(_data(parts))
        for data in told:
            if data != "[DONE]":
                validators[case.operation.path].validate(json.loads(data))
        ends = [_ends(data) for data in told]
        assert ends.count(True) == 1 and ends[-1], f"one end, the last thing said: {told[-3:]}"

    return check


def _data(parts: list[str]) -> Iterator[str]:
    for part in parts:
        lines = part.split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert len(data) == 1 and len(lines) <= 2, f"no event: {part!r}"
        yield data[0]


def _ends(data: str) -> bool:
    """OpenAI's, Anthropic's and the typed events' words for it; a response that failed says so twice."""
    if data == "[DONE]":
        return True
    said = json.loads(data)
    if "sequence_number" in said:
        return said["type"] in RESPONSE_ENDS
    return said.get("type") == "message_stop" or "error" in said or ("finish_reason" in said and "choices" not in said)
