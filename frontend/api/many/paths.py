"""The description of the routes that load and unload models, for /openapi.json."""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.many.fields import Accepted, ModelRequest
from frontend.api.requests.request_model import RequestModel

REQUESTS: Mapping[str, type[RequestModel]] = {"ModelRequest": ModelRequest}
RESPONSES: Mapping[str, Any] = {"Accepted": Accepted}


def paths(post: Callable[..., dict[str, Any]], error: dict[str, str]) -> dict[str, Any]:
    """Returns the routes. post: describes a route"""
    return {
        "/models/load": post("Load a model of many", "ModelRequest", "Accepted", error),
        "/models/unload": post(
            "Unload a model of many", "ModelRequest", "Accepted", error, operation="ModelRequestUnload"
        ),
    }
