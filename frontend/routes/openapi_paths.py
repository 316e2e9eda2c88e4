"""Describes llama.cpp's routes for /openapi.json."""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.llama_cpp import response_types as types
from frontend.api.llama_cpp.completion import LlamaCppCompletionRequest
from frontend.api.llama_cpp.embedding import LlamaCppEmbeddingRequest
from frontend.api.llama_cpp.infill import InfillRequest
from frontend.api.llama_cpp.options import AdapterScale
from frontend.api.openai.chat_input import TemplateRequest
from frontend.api.requests.request_model import RequestModel

REQUESTS: Mapping[str, type[RequestModel]] = {
    "LlamaCppCompletionRequest": LlamaCppCompletionRequest,
    "InfillRequest": InfillRequest,
    "LlamaCppEmbeddingRequest": LlamaCppEmbeddingRequest,
    "TemplateRequest": TemplateRequest,
    "AdapterScale": AdapterScale,
}
RESPONSES: Mapping[str, Any] = {
    "LlamaCppCompletion": types.LlamaCppCompletion,
    "LlamaCppPart": types.LlamaCppPart,
    "LlamaCppPrompt": types.LlamaCppPrompt,
    "LlamaCppEmbeddings": list[types.LlamaCppEmbedding],
    "LlamaCppProps": types.LlamaCppProps,
    "LlamaCppSlots": list[types.LlamaCppSlot],
    "LlamaCppAdapters": list[types.LlamaCppAdapter],
    "LlamaCppError": types.LlamaCppError,
}
Describe = Callable[..., dict[str, Any]]


def paths(post: Describe, get: Describe, ref: Callable[[str], dict[str, str]]) -> dict[str, Any]:
    """Returns the descriptions by path.

    post, get: functions that describe one route
    ref: a function that refers to a type by name
    """
    error = ref("LlamaCppError")
    events = {"anyOf": [ref("LlamaCppPart"), ref("LlamaCppCompletion"), error]}
    completion = (
        "Continue a text, as llama.cpp does",
        "LlamaCppCompletionRequest",
        "LlamaCppCompletion",
        error,
        events,
    )
    vectors = ("Texts as vectors, as llama.cpp has them", "LlamaCppEmbeddingRequest", "LlamaCppEmbeddings", error)

    count = ("Count a chat's tokens", "TemplateRequest", "InputTokens", ref("OpenAIError"))

    def reads(summary: str, gives: str) -> dict[str, Any]:
        return get(summary, {"application/json": {"schema": ref(gives)}}, error=error)

    return {
        "/completion": _several(post(*completion)),
        "/completions": _several(post(*completion, operation="LlamaCppCompletionRequestPlural")),
        "/infill": _several(post("Fill in the middle of a text", "InfillRequest", "LlamaCppCompletion", error, events)),
        "/apply-template": post("Show the prompt of a chat", "TemplateRequest", "LlamaCppPrompt", error),
        "/v1/chat/completions/input_tokens": post(*count, operation="ChatTokenCount"),
        "/chat/completions/input_tokens": post(*count, operation="ChatTokenCountUnversioned"),
        "/embedding": post(*vectors),
        "/embeddings": post(*vectors, operation="LlamaCppEmbeddingRequestPlural"),
        "/props": reads("What the server is", "LlamaCppProps"),
        "/slots": reads("What the requests of the key do", "LlamaCppSlots"),
        "/lora-adapters": {
            **reads("The LoRA adapters", "LlamaCppAdapters"),
            **_taking_several(post("Set the adapter of requests without one", "AdapterScale", "Accepted", error)),
        },
    }


def _taking_several(route: dict[str, Any]) -> dict[str, Any]:
    """Changes the body's type to an array of that type."""
    content = route["post"]["requestBody"]["content"]["application/json"]
    content["schema"] = {"type": "array", "items": content["schema"]}
    return route


def _several(route: dict[str, Any]) -> dict[str, Any]:
    """Adds two forms of the response: an array for several answers, and fewer fields with `response_fields`."""
    whole = route["post"]["responses"]["200"]["content"]["application/json"]
    some = {"type": "object", "description": "With `response_fields`: only these"}
    one = {"anyOf": [whole["schema"], some]}
    whole["schema"] = {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
    return route
