"""The interface of an API format, and the tables that say which format a path uses."""

from collections.abc import Mapping
from typing import Any, Protocol

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.anthropic import messages
from frontend.api.llama_cpp import completion as llama_cpp_completion
from frontend.api.llama_cpp import infill as llama_cpp_infill
from frontend.api.llama_cpp import output as llama_cpp_envelope
from frontend.api.ollama import chat as ollama_chat
from frontend.api.ollama import generate as ollama_generate
from frontend.api.openai import chat, completions, responses, typed_events
from frontend.api.openai.completions import requested_stream_format
from frontend.api.sglang import generate as sglang_generate
from frontend.errors import SluiceError
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.base import RequestModel
from frontend.server.middleware import Envelope
from frontend.server.sse import Framing, StreamWriter
from shared.config.frontend import FrontendConfig


class ApiFormat(Protocol):
    """The interface of a module in a folder beside this file that implements one format."""

    NAME: str  # the format's name in logs and traces
    PREFIX: str  # the prefix of a response's id
    FRAMING: Framing  # how the events of a stream are framed

    @property
    def REQUEST(self) -> type[RequestModel]: ...  # the type that a body is decoded into

    async def parse(self, request: Any, context: ModelContext, /) -> GenerationRequest | bytes: ...
    def stream_writer(self, context: ResponseContext) -> StreamWriter: ...
    async def complete(self, context: ResponseContext, arriving: AsyncDeltas) -> bytes: ...
    def status(self, exc: SluiceError, /) -> int: ...
    def error(self, exc: SluiceError, request_id: str) -> bytes: ...
    def stream_error(self, exc: SluiceError, request_id: str, context: ResponseContext) -> bytes: ...


API_FORMATS: Mapping[str, ApiFormat] = {  # path of each route that generates text → its format
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/chat/completions": chat,
    "/v1/responses": responses,
    "/responses": responses,
    "/v1/messages": messages,
    "/api/chat": ollama_chat,
    "/api/generate": ollama_generate,
    "/completion": llama_cpp_completion,
    "/completions": llama_cpp_completion,
    "/infill": llama_cpp_infill,
    "/generate": sglang_generate,
}
ERRORS: Mapping[str, Envelope] = {  # the error format of other paths, by prefix; a path without a row uses OpenAI's
    "/v1/messages/": messages,
    "/api/": ollama_chat,
    **dict.fromkeys(("/apply-template", "/embedding", "/props", "/slots", "/lora-adapters"), llama_cpp_envelope),
}


def api_format(path: str, body: bytes, config: FrontendConfig) -> ApiFormat:
    """Returns the API format of the response. Errors use it, too, even if the body cannot be decoded."""
    if path == "/v1/completions":
        wanted = requested_stream_format(body) or config.completions_stream_format
        return typed_events if wanted == "events" else completions
    return API_FORMATS[path]


def error_format(path: str, config: FrontendConfig) -> Envelope:
    """Returns the API format of an error before the body is read, or on a route that generates no text."""
    if path in API_FORMATS:
        return api_format(path, b"", config)
    return next((envelope for start, envelope in ERRORS.items() if path.startswith(start)), chat)
