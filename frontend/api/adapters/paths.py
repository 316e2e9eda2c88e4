"""Describes the routes that load and unload adapters, for /openapi.json."""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.adapters.fields import LoadAdapterRequest, UnloadAdapterRequest
from frontend.api.requests.request_model import RequestModel

REQUESTS: Mapping[str, type[RequestModel]] = {
    "LoadAdapterRequest": LoadAdapterRequest,
    "UnloadAdapterRequest": UnloadAdapterRequest,
}


def paths(post: Callable[..., dict[str, Any]], error: dict[str, str]) -> dict[str, Any]:
    """Returns the description of each route by its path. post: a function that describes one POST route"""
    return {
        "/v1/load_lora_adapter": _telling(post("Load a LoRA adapter", "LoadAdapterRequest", "Health", error)),
        "/v1/unload_lora_adapter": _telling(post("Unload a LoRA adapter", "UnloadAdapterRequest", "Health", error)),
    }


def _telling(route: dict[str, Any]) -> dict[str, Any]:
    """Changes the response type in a description to plain text."""
    route["post"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return route
