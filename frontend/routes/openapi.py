"""The published description of the HTTP API (OpenAPI 3.1), made from the types that requests are decoded into.

Lists each route's request type and response types. A test compares these routes with the app's.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend.app_state import AppState, json_response
from frontend.routes import openapi_kept, openapi_paths, tokenize
from frontend.routes.openapi_paths import REQUESTS, RESPONSES
from frontend.schema import responses
from frontend.schema.base import RequestModel
from frontend.schema.json_schema import Schema, request_schema
from shared.build import version

NOT_SUPPORTED = "Not supported: only values that leave the feature off are accepted"
ERRORS = {
    400: "Not JSON, a wrong type, an empty prompt, or not acceptable; the message names the field",
    401: "The API key is missing or wrong",
    403: "A web page of another site sent the request, or the route needs a server with API keys",
    408: "The request did not arrive in time",
    413: "The body is too large",
    404: "The model of that name is not served",
    415: "`Content-Encoding` is unknown, or `Content-Type` is not JSON's, `text/plain`, what `curl -d` says, or absent",
    422: "On /v1/completions, instead of 400 and 404: well-formed but not acceptable",
    431: "The request's line and headers are too large",
    500: "A fault of the server; the message has the id under which it is logged",
    501: "The model cannot do what the route is for",
    503: "Too busy, or no model is loaded yet; `Retry-After` says when to try again",
    504: "The request did not end within its `deadline_ms`",
}
TEI = {  # instead of 400, 500 and 503 on routes of Text Embeddings Inference
    422: "Not JSON, a wrong type, or not acceptable", 424: "A fault of the server", 429: "Too busy; come again later",
}  # fmt: skip
TEI_TAKES = {"TeiEmbedRequest", "TeiPredictRequest", "TeiSimilarityRequest"}
STRICT = {"CompletionRequest"}  # request types that refuse unknown fields with 422; the others ignore them
UNABLE = {"InfillRequest"}  # request types that are refused with 501 if the model lacks the ability
EARLY = {408, 431}  # statuses of errors before the route is known, which are always in OpenAI's format
REQUEST_ID = {"X-Request-Id": {"description": "Sent back, or made up", "schema": {"type": "string"}}}
RETRY_AFTER = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}


def document() -> dict[str, Any]:
    """Returns the whole description as plain values for JSON."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": version(), "description": "Serves an open-weight language model."},
        "paths": {
            **_generating(),
            **_pooling(),
            **_counting(),
            **tokenize.paths(_post, ref("OpenAIError"), ref("AnthropicError")),
            "/invocations": _invocations(),
            **_ollama(),
            **openapi_kept.kept_paths(_post, _get, ref),
            **openapi_kept.batch_paths(_post, _get, ref),
            **openapi_paths.lora_paths(_post, ref("OpenAIError")),
            **openapi_paths.many_paths(_post, _get, ref),
            **openapi_paths.llama_cpp_paths(_post, _get, ref),
            **openapi_paths.sglang_paths(_post, _get, _readiness(), _reset(), ref),
            **_reporting(),
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "components": {
            "schemas": {
                **{name: _request(name, kind) for name, kind in REQUESTS.items()},
                **responses.schemas(RESPONSES),
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _request(name: str, kind: type[RequestModel]) -> dict[str, Any]:
    """Returns the schema of a body. Each of its fields has a description."""
    body = request_schema(kind)
    body = body if name in STRICT else _open_to_more(body)
    fields = {name: {"description": NOT_SUPPORTED, **shape} for name, shape in body["properties"].items()}
    return {**body, "properties": fields}


def _open_to_more(shape: Any) -> Any:
    """Returns a schema that allows unknown fields, because the server ignores them."""
    match shape:
        case dict():
            entries = shape.items()
            return {name: _open_to_more(one) for name, one in entries if (name, one) != ("additionalProperties", False)}
        case list():
            return [_open_to_more(one) for one in shape]
    return shape


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _generating() -> dict[str, Any]:
    """Describes the routes that generate text: in one response or, with `stream`, in server-sent events."""
    openai_error, anthropic_error = ref("OpenAIError"), ref("AnthropicError")
    either = {"anyOf": [openai_error, ref("ErrorEvent")]}  # `stream_format` in the body decides the form of the error
    typed = [ref(name) for name in ("TokenEvent", "DoneEvent", "ErrorEvent")]
    events = {"anyOf": [ref("CompletionChunk"), openai_error, *typed]}
    chunks = {"anyOf": [ref("ChatCompletionChunk"), openai_error]}
    steps = {"anyOf": [ref("ResponseEvent"), openai_error]}
    parts = {"anyOf": [ref("MessageEvent"), anthropic_error]}
    chat = ("Answer a chat", "ChatCompletionRequest", "ChatCompletion", openai_error, chunks)
    response = ("Answer a chat, in OpenAI's newer format", "ResponseRequest", "Response", openai_error, steps)
    return {
        "/v1/completions": _post("Continue a text", "CompletionRequest", "Completion", either, events),
        "/v1/chat/completions": _post(*chat),
        "/chat/completions": _post(*chat, operation="ChatCompletionRequestUnversioned"),
        "/v1/responses": _socket() | _post(*response),
        "/responses": _socket() | _post(*response, operation="ResponseRequestUnversioned"),
        "/v1/messages": _post("Answer a chat, as Anthropic does", "MessageRequest", "Message", anthropic_error, parts),
    }


def _socket() -> dict[str, Any]:
    """Describes the handshake of a WebSocket. OpenAPI has no words for its messages: docs/kept-answers.md has them."""
    said = _json(ref("OpenAIError"))
    refused = {
        "400": "The handshake is none", "426": "No WebSocket is asked for, or `Sec-WebSocket-Version` is not 13",
    }  # fmt: skip
    described = _get("Open a WebSocket, whose messages are requests of this route", {})
    answers = described["get"]["responses"]
    del answers["200"]
    answers["101"] = {"description": "The connection goes on as a WebSocket", "headers": REQUEST_ID}
    answers |= {status: _answer(reason, said) for status, reason in refused.items()}
    return described


def _pooling() -> dict[str, Any]:
    """Describes the routes whose responses are vectors or scores. Servers with other tasks refuse them."""
    error = ref("OpenAIError")
    score = ("Score how relevant texts are to others", "ScoreRequest", "Scores", error)
    rank = ("Order documents by their relevance to a query", "RerankRequest", "RankingOrTexts", error)
    arrays = _post("Score the tokens of texts", "LogprobsRequest", "ScoredTokensList", error)
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    arrays["post"]["responses"]["200"]["content"] |= binary  # with `"encoding_format": "bytes"`
    labels = ("Label texts", "ClassifyRequest", "Classification", error)
    tei, cohere = ref("TeiError"), ref("CohereError")
    return {
        "/pooling": _post("Vectors of texts or of their tokens, or labels", "PoolingRequest", "PooledList", error),
        "/v1/classify": _post(*labels),
        "/classify": _post(*labels, operation="ClassifyRequestUnversioned"),
        "/embed": _post(
            "Texts as vectors, as Text Embeddings Inference has them", "TeiEmbedRequest", "TeiVectors", tei
        ),
        "/similarity": _post(
            "Score the similarity of texts, as TEI does", "TeiSimilarityRequest", "TeiSimilarities", tei
        ),
        "/predict": _post("Label texts, as TEI does", "TeiPredictRequest", "TeiPredictions", tei),
        "/v1/embed": _post(
            "Texts as vectors, as older clients of Cohere expect them",
            "CohereEmbedRequest",
            "CohereEmbeddingsV1",
            cohere,
            operation="CohereEmbedRequestV1",
        ),
        "/v2/embed": _post("Texts as vectors, as Cohere has them", "CohereEmbedRequest", "CohereEmbeddings", cohere),
        "/v1/logprobs": arrays,
        "/v1/systemone": _post(
            "Answer typed questions by probabilities", "SystemOneRequest", "StructuredDecision", error
        ),
        "/generative_scoring": _post(
            "Probabilities of tokens after a query and items", "GenerativeScoringRequest", "ItemScores", error
        ),
        "/v1/decisions": _post("Judge an input, as OpenAI does", "DecisionRequest", "Decision", error),
        "/v1/embeddings": _post("Texts as vectors", "EmbeddingRequest", "Embeddings", error),
        "/v1/score": _post(*score),
        "/score": _post(*score, operation="ScoreRequestUnversioned"),
        "/v1/rerank": _post(*rank),
        "/v2/rerank": _post(*rank, operation="RerankRequestV2"),
        "/rerank": _post(*rank, operation="RerankRequestUnversioned"),
        "/v1/reranking": _post(*rank, operation="RerankingRequest"),
        "/reranking": _post(*rank, operation="RerankingRequestUnversioned"),
    }


def _ollama() -> dict[str, Any]:
    """Describes the routes of Ollama's API."""
    error = ref("OllamaError")
    lines = "application/x-ndjson"
    shown = ("OllamaChat", "OllamaText", "OllamaProgress")
    chat, text, progress = ({"anyOf": [ref(name), error]} for name in shown)
    return {
        "/api/chat": _post("Answer a chat, as Ollama does", "OllamaChatRequest", "OllamaChat", error, chat, lines),
        "/api/generate": _post("Answer a text", "OllamaTextRequest", "OllamaText", error, text, lines),
        "/api/embed": _post("Texts as vectors", "EmbedRequest", "OllamaEmbeddings", error),
        "/api/embeddings": _post("A text as a vector", "OneEmbeddingRequest", "OllamaEmbedding", error),
        "/api/tags": _get("The model that is served", _json(ref("OllamaModels")), error=error),
        "/api/ps": _get("The model, if it is loaded", _json(ref("OllamaProcesses")), error=error),
        "/api/show": _post("What the model is and can do", "ShowRequest", "OllamaShown", error),
        "/api/pull": _post("Fetch a model", "PullRequest", "OllamaProgress", error, progress, lines),
        "/api/create": _post("Make a name for a model", "CreateRequest", "OllamaProgress", error, progress, lines),
        "/api/blobs/{digest}": _blobs(error),
        "/api/copy": _empty(_post("Make another name for a model", "CopyRequest", "OllamaProgress", error)),
        "/api/delete": {
            "delete": _empty(_post("Remove a name, and a model", "DeleteRequest", "OllamaProgress", error))["post"]
        },
        "/api/version": _get("The version of Ollama's API", _json(ref("OllamaVersion")), error=error),
    }


def _blobs(error: Schema) -> dict[str, Any]:
    """Describes the routes of uploaded files, whose answers have no body."""
    said = _json(error)
    looking = _empty({"post": _get("Whether a file was uploaded", {}, error=error)["get"]})["post"]
    sending = _empty({"post": _get("Upload a GGUF file", {}, error=error)["get"]})["post"]
    refused = {"400": "Not the file of this digest, or no GGUF file", "413": "There is no room", "503": ERRORS[503]}
    looking["responses"] |= {status: _answer("No such file", said) for status in ("400", "404")}
    sending["responses"] |= {status: _answer(reason, said) for status, reason in refused.items()}
    sending["responses"] |= {"201": {"description": "Uploaded"}, "200": {"description": "It was there already"}}
    sending["requestBody"] = {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
    digest = {"name": "digest", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "head": looking | {"operationId": "FindBlob"}, "post": sending | {"operationId": "UploadBlob"},
        "parameters": [digest],
    }  # fmt: skip


def _empty(route: dict[str, Any]) -> dict[str, Any]:
    """Changes the description of a POST route to that of one whose response has no body."""
    route["post"]["responses"]["200"].pop("content")
    return route


def _counting() -> dict[str, Any]:
    openai_error, anthropic_error = ref("OpenAIError"), ref("AnthropicError")
    return {
        "/v1/responses/input_tokens": _post(
            "Count a response's input tokens", "InputRequest", "InputTokens", openai_error
        ),
        "/v1/messages/count_tokens": _post(
            "Count a message's tokens", "CountRequest", "InputTokenCount", anthropic_error
        ),
        "/v1/receipts/verify": _post("Check the receipt of an answer", "VerifyRequest", "Verification", openai_error),
        "/tokenize": _post("Text or a chat as token ids", "TokenizeRequest", "Tokens", openai_error),
        "/v1/tokenize": _post(
            "The same as /tokenize", "TokenizeRequest", "Tokens", openai_error, operation="SglangTokenize"
        ),
        "/detokenize": _post("Token ids as text", "DetokenizeRequest", "Prompt", openai_error),
        "/v1/detokenize": _post(
            "The same as /detokenize", "DetokenizeRequest", "Prompt", openai_error, operation="SglangDetokenize"
        ),
    }


def _invocations(
    summary: str = "For SageMaker: a chat by `messages`, a text by `prompt`, vectors or labels by `input`, "
    "scores by `text_1` or `query`",
    operation: str = "Invocation",
) -> dict[str, Any]:
    """Describes SageMaker's route or `/`. Its request and response types are those of the routes it forwards to."""
    takes = (
        "ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "ClassifyRequest", "ScoreRequest",
        "RerankRequest", "TeiEmbedRequest", "TeiPredictRequest", "TeiSimilarityRequest",
    )  # fmt: skip
    gives = (
        "ChatCompletion", "Completion", "Embeddings", "Classification", "Scores", "Ranking", "RankedTexts",
        "TeiVectors", "TeiPredictions", "TeiSimilarities",
    )  # fmt: skip
    chunks = {"anyOf": [ref("ChatCompletionChunk"), ref("CompletionChunk"), ref("OpenAIError")]}
    error = {"anyOf": [ref("OpenAIError"), ref("TeiError")]}
    path = _post(summary, takes[0], gives[0], error, chunks, operation=operation)
    path["post"]["requestBody"]["content"] = _json({"anyOf": [ref(name) for name in takes]})
    path["post"]["responses"]["200"]["content"] |= _json({"anyOf": [ref(name) for name in gives]})
    path["post"]["responses"] |= {str(status): _answer(reason, _json(error)) for status, reason in TEI.items()}
    return path


def _reporting() -> dict[str, Any]:
    """Describes the routes that only report: pages, health, statistics, models."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    error = ref("OpenAIError")
    missing = {"404": _answer("Nothing of that name", _json(error))}
    later = {"503": _answer(ERRORS[503], _json(error), RETRY_AFTER)}
    page = {"text/html": {"schema": {"type": "string"}}}
    files = {kind: {"schema": {"type": "string"}} for kind in ("text/html", "text/css", "text/javascript")}
    prometheus = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/": {
            **_open(_get("The playground", page)),
            **_invocations("What a body with `inputs` or `query` asks for, as TEI does", "Root"),
        },
        "/web/{name}": _open(_get("The playground's files", files, missing)) | {"parameters": [name]},
        "/health": _open(_get("Whether the process runs", _json(ref("Health")))),
        "/v1/health": _open(_get("The same as /health", _json(ref("Health")))),
        "/ready": _readiness(),
        "/ping": _ping(),
        "/load": _get("How many requests this frontend has in work", _json(ref("Load"))),
        "/version": _get("The server's version", _json(ref("Version"))),
        "/reset_prefix_cache": _reset(),
        "/stats": _get("What the scheduler does", _json(ref("Stats"))),
        "/metrics": _get("The same and more, for Prometheus", prometheus),
        "/openapi.json": _get("This description", _json({"type": "object"})),
        "/tokenizer_info": _get("The tokenizer's special tokens and chat template", _json(ref("TokenizerInfo")), later),
        "/v1/models": _get("The model that is served", _json(ref("ModelList"))),
        "/models": _models(),
        "/v1/models/{name}": _get("One model", _json(ref("Model")), missing) | {"parameters": [name]},
    }


def _post(
    summary: str,
    takes: str,
    gives: str,
    error: Schema,
    events: Schema | None = None,
    stream: str = "text/event-stream",
    *,
    operation: str = "",
) -> dict[str, Any]:
    """Describes a POST route.

    takes, gives: names of the request type and of the response type
    operation: the operation's id; if empty, the name of the request type
    events: the schema of the JSON in each event of a stream, for which OpenAPI 3.1 has no keyword
    stream: the media type of a stream
    """
    content = _json(ref(gives))
    if events is not None:
        content[stream] = {"x-event-data": events}
    answers = {"200": _answer("Done", content)}
    for status in ERRORS.keys() - {404 if takes in STRICT else 422, 0 if takes in UNABLE else 501}:
        reason = ERRORS[status]
        words = ref("OpenAIError") if status in EARLY else error
        answers[str(status)] = _answer(reason, _json(words), RETRY_AFTER if status == 503 else {})
    if takes in TEI_TAKES:
        answers |= {str(status): _answer(reason, _json(error)) for status, reason in TEI.items()}
    body = {"required": True, "content": _json(ref(takes))}
    return {"post": {"summary": summary, "operationId": operation or takes, "requestBody": body, "responses": answers}}


def _get(
    summary: str, content: dict[str, Any], more: Mapping[str, Any] | None = None, error: Schema | None = None
) -> dict[str, Any]:
    said = _json(error or ref("OpenAIError"))
    denied = {str(status): _answer(ERRORS[status], said) for status in (401, 403, 431, 500)}
    return {"get": {"summary": summary, "responses": {"200": _answer("Done", content), **denied, **(more or {})}}}


def _models() -> dict[str, Any]:
    said = _json(ref("OpenAIError"))
    failed = {str(status): _answer(ERRORS[status], said) for status in (400, 503)}
    described = _get("The same as /v1/models", _json(ref("ModelList")), failed)["get"]
    summary = "The same as /v1/models; with `reload`, after the table of many models was read again"
    reload = {"name": "reload", "in": "query", "schema": {"enum": ["1", "true"]}}
    return {"get": described, "post": described | {"summary": summary, "parameters": [reload]}}


def _readiness() -> dict[str, Any]:
    busy = {"503": _answer("Not now, and why", _json(ref("NotReady")), RETRY_AFTER)}
    return _open(_get("Whether a request would be served now", _json(ref("Ready")), busy))


def _reset() -> dict[str, Any]:
    error = _json(ref("OpenAIError"))
    answers = {str(status): _answer(ERRORS[status], error) for status in (401, 403, 431, 500, 503)}
    done = _answer("Done; by how many workers", _json(ref("PrefixCacheReset")))
    return {"post": {"summary": "Empty the prefix caches of all workers", "responses": {"200": done, **answers}}}


def _ping() -> dict[str, Any]:
    """Describes SageMaker's health route, which accepts both methods."""
    path = _open(_get("The same as /health", _json(ref("Health"))))
    return path | {"post": path["get"]}


def _open(path: dict[str, Any]) -> dict[str, Any]:
    """Marks a route as needing no API key."""
    path["get"]["security"] = []
    del path["get"]["responses"]["401"]
    return path


def _json(shape: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": shape}}


def _answer(reason: str, content: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"description": reason, "content": content, "headers": {**REQUEST_ID, **(headers or {})}}


async def openapi_json(app: AppState, request: Request) -> Response:
    return json_response(document())
