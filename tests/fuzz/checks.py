"""Checks every answer to a request that the OpenAPI document allows, or nearly allows."""

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


def no_server_error(context: CheckContext, response: Response, case: Case) -> None:
    """Checks the status. 501 (the model cannot do it), 503 (busy), 504 (too late) are valid; any other 5xx is a bug."""
    assert response.status_code < 500 or response.status_code in (501, 503, 504), response.text


def events_conform(document: Mapping[str, Any]) -> Callable[[CheckContext, Response, Case], None]:
    """Returns a check that every event of a stream matches the document, and that the stream has exactly one end."""
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
        events = list(_data(parts))
        for data in events:
            if data != "[DONE]":
                validators[case.operation.path].validate(json.loads(data))
        ends = [_is_end(data) for data in events]
        assert ends.count(True) == 1 and ends[-1], f"one end, as the last event: {events[-3:]}"

    return check


def _data(parts: list[str]) -> Iterator[str]:
    for part in parts:
        lines = part.split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert len(data) == 1 and len(lines) <= 2, f"not an event: {part!r}"
        yield data[0]


def _is_end(data: str) -> bool:
    """Whether the event ends a stream of any API format; a failed response has an error and a final event."""
    if data == "[DONE]":
        return True
    event = json.loads(data)
    if event.get("stop") is True and "generation_settings" in event:
        return True
    if "sequence_number" in event:
        return event["type"] in RESPONSE_ENDS
    return (
        event.get("type") == "message_stop" or "error" in event or ("finish_reason" in event and "choices" not in event)
    )
