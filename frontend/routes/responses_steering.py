"""Steering over a WebSocket: input that a client adds to a response while it is generated (`response.steer`).

These are the messages and their checks; responses_socket.py decides when what was added is answered.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request

from frontend.errors import BadRequest
from frontend.schema.base import to_json

STEER_FIELDS = {"type", "previous_response_id", "input"}
CALL, OUTPUT = "_call", "_call_output"  # how the types of a call and of its result end
Fields = dict[str, msgspec.Raw]


class SteerError(Exception):
    """Why input is not accepted, or leads to no response. The codes are OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False, slots=True)
class Steer:
    """What a client adds. previous: the response; message: the request whose body it is, as long as that is counted"""

    previous: str
    given: msgspec.Raw
    message: Request
    id: str = field(default_factory=lambda: f"steer_{secrets.token_hex(12)}")

    def accepted(self) -> dict[str, Any]:
        return {"type": "response.steer.accepted", "sequence_number": 0, "steer": self._named()}

    def pending(self, required: list[dict[str, str]]) -> dict[str, Any]:
        more = {"reason": "waiting_for_required_input", "required_input": required}
        return {"type": "response.steer.pending", "sequence_number": 0, "steer": self._named(), **more}

    def failed(self, why: SteerError, *, accepted: bool) -> dict[str, Any]:
        named = self._named() if accepted else {"previous_response_id": self.previous}
        error = {"type": BadRequest.kind, "code": why.code, "message": str(why)}
        steer = {**named, "input": self.given}
        return {"type": "response.steer.failed", "sequence_number": 0, "steer": steer, "error": error}

    def _named(self) -> dict[str, Any]:
        return {"id": self.id, "previous_response_id": self.previous}


class _Part(msgspec.Struct):
    type: Literal["input_text", "input_image", "input_file"]


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user"]
    content: str | list[_Part]
    type: Literal["message"] = "message"


_INPUT = msgspec.json.Decoder(str | list[_Message])


def check_steer(fields: Fields) -> None:
    """Raises SteerError for a message with other fields, or an input that is not made of messages of the user."""
    if others := sorted(fields.keys() - STEER_FIELDS):
        raise SteerError("invalid_input", f"`{others[0]:.80}` has no place in response.steer")
    try:
        given = _INPUT.decode(fields.get("input", msgspec.Raw(b"null")))
    except msgspec.MsgspecError as exc:
        raise SteerError("invalid_input", f"`input` must be a text or messages of the user: {exc}") from None
    if not given:
        raise SteerError("invalid_input", "`input` must not be empty")


def required_input(output: bytes) -> list[dict[str, str]]:
    """Returns what the next request has to bring: a result for each call of an output (its items, without brackets)."""
    found = []
    for item in msgspec.json.decode(b"[%b]" % output):
        if item["type"].endswith(CALL) and "call_id" in item:
            stub = {"type": item["type"].removesuffix(CALL) + OUTPUT, "call_id": item["call_id"]}
            found.append(stub | ({"name": item["name"]} if item["type"] == "function_call" else {}))
    return found


def steer_message(event: dict[str, Any], stream_id: str | None) -> bytes:
    return to_json(event if stream_id is None else {**event, "stream_id": stream_id})
