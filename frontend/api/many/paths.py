"""Describes the routes that load and unload one model or all models, for /openapi.json."""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.many.fields import ModelRequest, Sleeping
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.response_types import Accepted

REQUESTS: Mapping[str, type[RequestModel]] = {"ModelRequest": ModelRequest}
RESPONSES: Mapping[str, Any] = {"Accepted": Accepted, "Sleeping": Sleeping}


def paths(
    post: Callable[..., dict[str, Any]], get: Callable[..., dict[str, Any]], ref: Callable[[str], dict[str, str]]
) -> dict[str, Any]:
    """Returns the descriptions by path.

    post, get: functions that describe one route
    ref: a function that refers to a type by name
    """
    error, sleeping = ref("OpenAIError"), {"application/json": {"schema": ref("Sleeping")}}
    failures = {"400": "Not acceptable", "503": "Not now, and why; `Retry-After` says when to try again"}
    more = {status: _failure(reason, error) for status, reason in failures.items()}
    level = {"name": "level", "in": "query", "schema": {"enum": ["1", "2"]}}
    sleep = {"post": get("Unload all models, and refuse requests until /wake_up", sleeping, more)["get"]}
    return {
        "/sleep": sleep | {"parameters": [level]},
        "/wake_up": {"post": get("Load what was loaded before /sleep", sleeping, more)["get"]},
        "/is_sleeping": get("Whether all models are unloaded until /wake_up", sleeping),
        "/models/load": post("Load a model of many", "ModelRequest", "Accepted", error),
        "/models/unload": post(
            "Unload a model of many", "ModelRequest", "Accepted", error, operation="ModelRequestUnload"
        ),
    }


def _failure(reason: str, error: dict[str, str]) -> dict[str, Any]:
    return {"description": reason, "content": {"application/json": {"schema": error}}}
