"""The interface of an API format, and the tables that say which format a path uses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.errors import SluiceError
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.base import RequestModel
from frontend.server.middleware import Envelope
from frontend.server.sse import Framing, StreamWriter
from shared.config.frontend import FrontendConfig

T = TypeVar("T")


class LazyModules:
    """Modules by name. Each is imported when it is first asked for, which takes some ten milliseconds."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}  # modules that are complete; sys.modules has those that a thread still imports

    def now(self, name: str) -> Any:
        """Returns the module or, for "module:NAME", the object with this name in it."""
        if (found := self._found.get(name)) is None:
            module, _, attribute = name.partition(":")
            found = import_module(module)
            self._found[name] = found = getattr(found, attribute) if attribute else found
        return found

    async def soon(self, name: str) -> Any:
        """Returns the module. If it is not imported yet, a thread imports it, so that streams go on."""
        found = self._found.get(name)
        return await asyncio.to_thread(self.now, name) if found is None else found


MODULES = LazyModules()


class Modules(Mapping[str, T], Generic[T]):
    """Modules by path of a route. A module is imported by the first request of one of its paths."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def __getitem__(self, path: str) -> T:
        return cast(T, MODULES.now(self.names[path]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ApiFormat(Protocol):
    """The functions of a module that implements one API format, such as frontend/api/openai/chat.py.

    A module with several formats has an object for each.
    """

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


@dataclass(frozen=True, slots=True)
class Format:
    """An API format in a module that has several. Its fields are those of ApiFormat."""

    NAME: str
    PREFIX: str
    FRAMING: Framing
    REQUEST: type[RequestModel]
    parse: Callable[[Any, ModelContext], Awaitable[GenerationRequest | bytes]]
    stream_writer: Callable[[ResponseContext], StreamWriter]
    complete: Callable[[ResponseContext, AsyncDeltas], Awaitable[bytes]]
    status: Callable[[SluiceError], int]
    error: Callable[[SluiceError, str], bytes]
    stream_error: Callable[[SluiceError, str, ResponseContext], bytes]


CHAT = "frontend.api.openai.chat"
LLAMA_CPP = "frontend.api.llama_cpp.completion:COMPLETION"
API_FORMATS: Modules[ApiFormat] = Modules({  # path of each route that generates text → the module of its format
    "/v1/completions": "frontend.api.openai.completions",
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/responses": "frontend.api.openai.responses",
    "/responses": "frontend.api.openai.responses",
    "/v1/messages": "frontend.api.anthropic.messages",
    "/api/chat": "frontend.api.ollama.chat:CHAT",
    "/api/generate": "frontend.api.ollama.chat:GENERATE",
    "/completion": LLAMA_CPP,
    "/completions": LLAMA_CPP,
    "/infill": "frontend.api.llama_cpp.completion:INFILL",
    "/generate": "frontend.api.sglang.generate",
})  # fmt: skip
TYPED_EVENTS = "frontend.api.openai.typed_events"
ERRORS: Mapping[str, str] = {  # the error format of other paths, by prefix; a path without a row uses OpenAI's
    "/v1/messages/": "frontend.api.anthropic.messages",
    "/api/": "frontend.api.ollama.chat:CHAT",
    **dict.fromkeys(("/apply-template", "/embedding", "/props", "/slots", "/lora-adapters"), LLAMA_CPP),
}


class _StreamFormat(msgspec.Struct):
    stream_format: Any = None


def requested_stream_format(body: bytes) -> Any:
    """Returns the field `stream_format` of a body whose other fields may be invalid; None if it cannot be read."""
    if b"stream_format" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_StreamFormat).stream_format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def name_of_format(path: str, body: bytes, config: FrontendConfig) -> str:
    """Returns the module of the API format of the response. Errors use it, too, even if the body cannot be decoded."""
    if path == "/v1/completions":
        wanted = requested_stream_format(body) or config.completions_stream_format
        return TYPED_EVENTS if wanted == "events" else API_FORMATS.names[path]
    return API_FORMATS.names[path]


async def api_format(path: str, body: bytes, config: FrontendConfig) -> ApiFormat:
    """Returns the API format of the response."""
    return cast(ApiFormat, await MODULES.soon(name_of_format(path, body, config)))


def error_format(path: str, config: FrontendConfig) -> Envelope:
    """Returns the API format of an error before the body is read, or on a route that generates no text."""
    if path in API_FORMATS:
        name = name_of_format(path, b"", config)
    else:
        name = next((name for start, name in ERRORS.items() if path.startswith(start)), CHAT)
    return cast(Envelope, MODULES.now(name))
