"""Describes SGLang's routes for /openapi.json."""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.requests.request_model import RequestModel
from frontend.api.sglang import response_types as types
from frontend.api.sglang.fields import GenerateRequest

REQUESTS: Mapping[str, type[RequestModel]] = {"SglangGenerateRequest": GenerateRequest}
RESPONSES: Mapping[str, Any] = {
    "SglangAnswer": types.SglangAnswer,
    "SglangAnswers": types.SglangAnswer | list[types.SglangAnswer],
    "SglangModelInfo": types.SglangModelInfo,
    "SglangServerInfo": types.SglangServerInfo,
}
Describe = Callable[..., dict[str, Any]]


def paths(
    post: Describe, get: Describe, ready: dict[str, Any], reset: dict[str, Any], ref: Callable[[str], dict[str, str]]
) -> dict[str, Any]:
    """Returns the descriptions of the routes by path.

    post, get: functions that describe one route
    ready, reset: the descriptions of /ready and /reset_prefix_cache
    ref: returns a reference to a type by its name
    """
    error = ref("OpenAIError")
    events = {"anyOf": [ref("SglangAnswer"), error]}

    def reads(summary: str, gives: str) -> dict[str, Any]:
        return get(summary, {"application/json": {"schema": ref(gives)}})

    return {
        "/generate": post("Continue a text, as SGLang does", "SglangGenerateRequest", "SglangAnswers", error, events),
        "/model_info": reads("What the model is", "SglangModelInfo"),
        "/get_model_info": reads("The same as /model_info", "SglangModelInfo"),
        "/server_info": reads("What the server is", "SglangServerInfo"),
        "/get_server_info": reads("The same as /server_info", "SglangServerInfo"),
        "/health_generate": ready,
        "/flush_cache": reset | {"get": reset["post"]},
    }
