"""Describes the routes of other servers' APIs for /openapi.json: adapters, many models, llama.cpp, SGLang.

The types of all request and response bodies follow at the end.
"""

from collections.abc import Callable, Mapping
from typing import Any

from frontend.api.anthropic import response_types as anthropic
from frontend.api.anthropic.messages_request import MessageCountRequest, MessageRequest
from frontend.api.llama_cpp import types as llama_cpp_types
from frontend.api.llama_cpp.completion import InfillRequest, LlamaCppCompletionRequest
from frontend.api.llama_cpp.options import AdapterScale
from frontend.api.llama_cpp.server import LlamaCppEmbeddingRequest
from frontend.api.ollama import chat as ollama_chat
from frontend.api.ollama import embed as ollama_embed
from frontend.api.ollama import models as ollama_models
from frontend.api.ollama import types as ollama
from frontend.api.openai import response_types as openai
from frontend.api.openai import responses_types as responses
from frontend.api.openai.chat_request import ChatRequest, TemplateRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseCountRequest, ResponseRequest
from frontend.api.pooling import (
    classify,
    cohere,
    decisions,
    embeddings,
    generative_scoring,
    logprobs,
    rerank,
    systemone,
    tei,
)
from frontend.api.pooling import fields as pooling
from frontend.api.pooling import pooling as any_pooling
from frontend.api.sglang import types as sglang_types
from frontend.api.sglang.types import GenerateRequest
from frontend.api.verification import Verification, VerifyRequest
from frontend.observability.stats import Stats
from frontend.routes import library, openapi_kept, tokenize
from frontend.routes.library import ModelEvent
from frontend.routes.lora import LoadAdapterRequest, UnloadAdapterRequest
from frontend.routes.models import ModelRequest, Sleeping
from frontend.routes.openapi_kept import refused
from frontend.routes.tokenize import AnyTokenizeRequest, DetokenizeRequest
from frontend.schema import responses as response_types
from frontend.schema.base import RequestModel
from frontend.schema.responses import Accepted

LLAMA_CPP_REQUESTS: Mapping[str, type[RequestModel]] = {
    "LlamaCppCompletionRequest": LlamaCppCompletionRequest,
    "InfillRequest": InfillRequest,
    "LlamaCppEmbeddingRequest": LlamaCppEmbeddingRequest,
    "TemplateRequest": TemplateRequest,
    "AdapterScale": AdapterScale,
}
LLAMA_CPP_RESPONSES: Mapping[str, Any] = {
    "LlamaCppCompletion": llama_cpp_types.LlamaCppCompletion,
    "LlamaCppPart": llama_cpp_types.LlamaCppPart,
    "LlamaCppPrompt": llama_cpp_types.LlamaCppPrompt,
    "LlamaCppEmbeddings": list[llama_cpp_types.LlamaCppEmbedding],
    "LlamaCppProps": llama_cpp_types.LlamaCppProps,
    "LlamaCppSlots": list[llama_cpp_types.LlamaCppSlot],
    "LlamaCppAdapters": list[llama_cpp_types.LlamaCppAdapter],
    "LlamaCppError": llama_cpp_types.LlamaCppError,
}
Describe = Callable[..., dict[str, Any]]


def llama_cpp_paths(post: Describe, get: Describe, ref: Callable[[str], dict[str, str]]) -> dict[str, Any]:
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
        "/slots/{id}": {
            "post": refused("Refused: there are no fixed slots to save, restore or erase", error),
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
        },
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


# Describes the routes that load and unload adapters, for /openapi.json.

LORA_REQUESTS: Mapping[str, type[RequestModel]] = {
    "LoadAdapterRequest": LoadAdapterRequest,
    "UnloadAdapterRequest": UnloadAdapterRequest,
}


def lora_paths(post: Callable[..., dict[str, Any]], error: dict[str, str]) -> dict[str, Any]:
    """Returns the description of each route by its path. post: a function that describes one POST route"""
    return {
        "/v1/load_lora_adapter": _with_text_response(
            post("Load a LoRA adapter", "LoadAdapterRequest", "Health", error)
        ),
        "/v1/unload_lora_adapter": _with_text_response(
            post("Unload a LoRA adapter", "UnloadAdapterRequest", "Health", error)
        ),
    }


def _with_text_response(route: dict[str, Any]) -> dict[str, Any]:
    """Changes the response type in a description to plain text."""
    route["post"]["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return route


# Describes the routes that load and unload one model or all models, for /openapi.json.

MANY_REQUESTS: Mapping[str, type[RequestModel]] = {"ModelRequest": ModelRequest}
MANY_RESPONSES: Mapping[str, Any] = {"Accepted": Accepted, "Sleeping": Sleeping, "ModelEvent": ModelEvent}


def many_paths(
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
        "/models/sse": _streaming(get("What models do, as it happens", {}, {"400": more["400"]}), ref("ModelEvent")),
        "/models/load": post("Load a model of many", "ModelRequest", "Accepted", error),
        "/models/unload": post(
            "Unload a model of many", "ModelRequest", "Accepted", error, operation="ModelRequestUnload"
        ),
    }


def _streaming(route: dict[str, Any], event: dict[str, str]) -> dict[str, Any]:
    """Changes the description of a GET route to that of a stream of these events."""
    route["get"]["responses"]["200"]["content"] = {"text/event-stream": {"x-event-data": event}}
    return route


def _failure(reason: str, error: dict[str, str]) -> dict[str, Any]:
    return {"description": reason, "content": {"application/json": {"schema": error}}}


# Describes SGLang's routes for /openapi.json.

SGLANG_REQUESTS: Mapping[str, type[RequestModel]] = {"SglangGenerateRequest": GenerateRequest}
SGLANG_RESPONSES: Mapping[str, Any] = {
    "SglangAnswer": sglang_types.SglangAnswer,
    "SglangAnswers": sglang_types.SglangAnswer | list[sglang_types.SglangAnswer],
    "SglangModelInfo": sglang_types.SglangModelInfo,
    "SglangServerInfo": sglang_types.SglangServerInfo,
}


def sglang_paths(
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


# The types of all request and response bodies, by their names in the API description.

REQUESTS: Mapping[str, type[RequestModel]] = {
    "CompletionRequest": CompletionRequest,
    "ChatCompletionRequest": ChatRequest,
    "ResponseRequest": ResponseRequest,
    "InputRequest": ResponseCountRequest,
    "MessageRequest": MessageRequest,
    "CountRequest": MessageCountRequest,
    "EmbeddingRequest": embeddings.EmbeddingRequest,
    "LogprobsRequest": logprobs.LogprobsRequest,
    "ScoreRequest": rerank.ScoreRequest,
    "RerankRequest": rerank.RerankRequest,
    "PoolingRequest": any_pooling.PoolingRequest,
    "ClassifyRequest": classify.ClassifyRequest,
    "DecisionRequest": decisions.DecisionRequest,
    "GenerativeScoringRequest": generative_scoring.GenerativeScoringRequest,
    "SystemOneRequest": systemone.SystemOneRequest,
    "TeiEmbedRequest": tei.TeiEmbedRequest,
    "TeiSimilarityRequest": tei.TeiSimilarityRequest,
    "TeiPredictRequest": tei.TeiPredictRequest,
    "CohereEmbedRequest": cohere.CohereEmbedRequest,
    "VerifyRequest": VerifyRequest,
    "TokenizeRequest": AnyTokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
    "OllamaChatRequest": ollama_chat.OllamaChatRequest,
    "OllamaTextRequest": ollama_chat.OllamaTextRequest,
    "EmbedRequest": ollama_embed.EmbedRequest,
    "OneEmbeddingRequest": ollama_embed.OneEmbeddingRequest,
    "ShowRequest": ollama_models.ShowRequest,
    "PullRequest": library.PullRequest,
    "CreateRequest": library.CreateRequest,
    "CopyRequest": library.CopyRequest,
    "DeleteRequest": library.DeleteRequest,
    **openapi_kept.KEPT_REQUESTS,
    **openapi_kept.BATCH_REQUESTS,
    **LORA_REQUESTS,
    **MANY_REQUESTS,
    **LLAMA_CPP_REQUESTS,
    **SGLANG_REQUESTS,
}
RESPONSES: Mapping[str, Any] = {
    **openapi_kept.KEPT_RESPONSES,
    **openapi_kept.BATCH_RESPONSES,
    **MANY_RESPONSES,
    "Completion": openai.Completion,
    "CompletionChunk": openai.CompletionChunk,
    "ChatCompletion": openai.ChatCompletion,
    "ChatCompletionChunk": openai.ChatCompletionChunk,
    "TokenEvent": openai.TokenEvent,
    "DoneEvent": openai.DoneEvent,
    "ErrorEvent": openai.ErrorEvent,
    "OpenAIError": openai.OpenAIError,
    "Response": responses.Response,
    "ResponseEvent": responses.ResponseEvent,
    "InputTokens": responses.InputTokens,
    "Message": anthropic.Message,
    "MessageEvent": anthropic.MessageEvent,
    "InputTokenCount": anthropic.InputTokenCount,
    "AnthropicError": anthropic.AnthropicError,
    "Embeddings": pooling.Embeddings,
    "ScoredTokensList": pooling.ScoredTokensList,
    "Scores": pooling.Scores,
    "Ranking": pooling.Ranking,
    "PooledList": any_pooling.PooledList,
    "Classification": classify.Classification,
    "Decision": decisions.Decision,
    "ItemScores": generative_scoring.ItemScores,
    "StructuredDecision": systemone.StructuredDecision,
    "TeiVectors": list[list[float]],
    "TeiSimilarities": list[float],
    "TeiPredictions": list[tei.Predicted | list[tei.Predicted]],
    "TeiError": tei.TeiError,
    "CohereEmbeddings": cohere.CohereEmbeddings,
    "CohereEmbeddingsV1": cohere.CohereEmbeddingsV1,
    "CohereError": cohere.CohereError,
    "RankedTexts": list[pooling.RankedInput],
    "RankingOrTexts": pooling.Ranking | list[pooling.RankedInput],
    "OllamaChat": ollama.OllamaChat,
    "OllamaText": ollama.OllamaText,
    "OllamaEmbeddings": ollama.OllamaEmbeddings,
    "OllamaEmbedding": ollama.OllamaEmbedding,
    "OllamaModels": ollama.OllamaModels,
    "OllamaProcesses": ollama.OllamaProcesses,
    "OllamaShown": ollama.OllamaShown,
    "OllamaProgress": library.OllamaProgress,
    "OllamaVersion": ollama.OllamaVersion,
    "OllamaError": ollama.OllamaError,
    **LLAMA_CPP_RESPONSES,
    **SGLANG_RESPONSES,
    **tokenize.RESPONSES,
    "Verification": Verification,
    "Tokens": response_types.Tokens,
    "Prompt": response_types.Prompt,
    "TokenizerInfo": response_types.TokenizerInfo,
    "Model": response_types.Model,
    "ModelList": response_types.ModelList,
    "Health": response_types.Health,
    "Load": response_types.Load,
    "Version": response_types.Version,
    "PrefixCacheReset": response_types.PrefixCacheReset,
    "Ready": response_types.Ready,
    "NotReady": response_types.NotReady,
    "Stats": Stats,
}
