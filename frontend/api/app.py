"""The routes, and the life of one HTTP request: read, parse, start the generation, write the response.

Knows HTTP and the API format of each route. The app can be created, and its port opened, before the tokenizer is loaded
or a worker is connected; until then the routes that need them answer 503 and `/ready` says what is missing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.api import models, tokenize
from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_input import MessageCountRequest
from frontend.api.common import AsyncDeltas, ModelContext, ResponseContext, to_json
from frontend.api.decoding import decode
from frontend.api.openai import chat, completions, responses, typed_events
from frontend.api.openai.chat_input import TokenizeRequest
from frontend.api.openai.completions_input import requested_stream_format
from frontend.api.openai.responses_input import ResponseCountRequest
from frontend.api.openapi import document
from frontend.api.request_model import RequestModel
from frontend.api.response_types import Health, NotReady, Ready
from frontend.errors import SluiceError, TooLarge
from frontend.generation.generation import Generation
from frontend.generation.service import Service
from frontend.observability.access_log import RequestRecord
from frontend.observability.hooks import EndHooks, end_hooks
from frontend.observability.metrics import PrometheusMetrics
from frontend.observability.stats import stats
from frontend.request import GenerationRequest
from frontend.server import playground
from frontend.server.auth import ApiKeys
from frontend.server.middleware import (
    API_FORMAT,
    CLOSED,
    DIRECT,
    RECORD,
    REQUEST_ID,
    SEND,
    Envelope,
    RequestMiddleware,
    client_error,
)
from frontend.server.sse import EventStream, StreamWriter
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import WorkerPool
from frontend.workers.status import ConnectionState
from shared.config import FrontendConfig, ModelConfig
from shared.messages import Limits

FLUSH_S = 1.0
LAG_S = 0.05  # between two measurements of the event loop's lag

SERVING = (ConnectionState.READY, ConnectionState.DRAINING)  # the model is loaded

T = TypeVar("T")


class ApiFormat(Protocol):
    """The interface of a module in `openai/` or `anthropic/` that handles one format."""

    NAME: str  # in logs and traces
    PREFIX: str  # of a response's id

    @property
    def REQUEST(self) -> type[RequestModel]: ...  # the type that a body is decoded into

    async def parse(self, request: Any, context: ModelContext, /) -> GenerationRequest: ...
    def stream_writer(self, context: ResponseContext) -> StreamWriter: ...
    async def complete(self, context: ResponseContext, arriving: AsyncDeltas) -> bytes: ...
    def error(self, exc: SluiceError, request_id: str) -> bytes: ...
    def stream_error(self, exc: SluiceError, request_id: str, context: ResponseContext) -> bytes: ...


API_FORMATS: Mapping[str, ApiFormat] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


def create_app(
    config: FrontendConfig,
    model: ModelConfig,
    pool: WorkerPool,
    tokenizer: asyncio.Future[Tokenizer],
    metrics: PrometheusMetrics,
) -> Starlette:
    """Creates the ASGI application; its lifespan starts and closes `pool`. `app.state.service` is the Service.

    Raises ConfigError if the file of API keys cannot be used.
    """
    ended = end_hooks(config, metrics)
    api = Api(config, model, Service(pool, tokenizer, metrics), metrics, ended)
    keys = ApiKeys(config.api_keys)
    middleware = Middleware(RequestMiddleware, keys=keys, envelope=api.envelope, rejected=metrics.rejected, ended=ended)
    app = Starlette(
        routes=api.routes(),
        middleware=[middleware],
        lifespan=api.lifespan,
        exception_handlers={HTTPException: _pass_on},
    )
    app.router.redirect_slashes = False
    app.state.service = api.service
    return app


def _pass_on(request: Request, exc: Exception) -> Response:
    raise exc  # the middleware makes the response


class Api:
    """The routes' functions and what they share."""

    def __init__(
        self,
        config: FrontendConfig,
        model: ModelConfig,
        service: Service,
        metrics: PrometheusMetrics,
        observers: EndHooks,
    ) -> None:
        self.service = service
        self._config = config
        self._name = model.name
        self._pool = service.pool
        self._metrics = metrics
        self._observers = observers
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/", playground.page),
            Route("/web/{name}", playground.page),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/stats", self.stats),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.document),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            *[Route(path, self.generate, methods=["POST"]) for path in API_FORMATS],
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    def envelope(self, path: str) -> Envelope:
        """Returns the API format of an error that occurs before the body is read."""
        return messages if path.startswith("/v1/messages/") else self._api_format(path)

    def _api_format(self, path: str, body: bytes = b"") -> ApiFormat:
        """Returns the API format of the response; an error has it, too, even if the body cannot be decoded."""
        if path == "/v1/completions":
            wanted = requested_stream_format(body) or self._config.completions_stream_format
            return typed_events if wanted == "events" else completions
        return API_FORMATS.get(path, completions)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._pool.start()
        tasks = [asyncio.create_task(self._flush()), asyncio.create_task(self._watch_lag())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self._pool.close()
            await asyncio.to_thread(self._observers.close)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._metrics.flush(self._pool.counters)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_S
            await asyncio.sleep(LAG_S)
            self._metrics.loop_lag(max(0.0, loop.time() - due))

    # generation

    async def generate(self, request: Request) -> Response:
        body = await self._body(request)
        begun = time.perf_counter()
        record: RequestRecord = request.scope[RECORD]
        api_format = request.scope[API_FORMAT] = self._api_format(request.scope["path"], body)
        record.api_format = api_format.NAME
        decoded = decode(body, api_format.REQUEST)
        await self.service.wait_for_handshake()
        context = self._context()
        generation_request = await api_format.parse(decoded, context)
        if record.tenant:
            generation_request = replace(generation_request, tenant=record.tenant)
        record.generation_request = generation_request
        generation = await _while_connected(request, self.service.start(generation_request, begun))
        record.generation = generation
        response_context = ResponseContext(generation_request, context.tokenizer, api_format.PREFIX)
        if generation_request.stream:
            return self._stream(request, api_format, response_context, generation)
        try:
            answer = await _while_connected(request, api_format.complete(response_context, generation.deltas()))
        finally:
            generation.close()
        return Response(answer, media_type="application/json")

    def _stream(
        self, request: Request, api_format: ApiFormat, context: ResponseContext, generation: Generation
    ) -> Response:
        request_id = request.scope[REQUEST_ID]
        return EventStream(
            generation,
            api_format.stream_writer(context),
            stream_error=lambda exc: api_format.stream_error(client_error(exc, request_id), request_id, context),
            close=lambda: generation.close(request.scope.get(CLOSED, "client")),
            keepalive_s=self._config.keepalive_s,
            send=request.scope[SEND],
            direct=request.scope.get(DIRECT),
        )

    async def _body(self, request: Request) -> bytes:
        """Reads the body. Raises TooLarge as soon as its announced or received length exceeds the limit."""
        most = self._config.max_body_bytes
        data = bytearray()
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > most:  # before `Expect: 100-continue` is answered
            raise TooLarge(f"the body is larger than {most} bytes", code="request_too_large")
        async for piece in request.stream():
            data += piece
            if len(data) > most:
                raise TooLarge(f"the body is larger than {most} bytes", code="request_too_large")
        return bytes(data)

    def _context(self) -> ModelContext:
        """Returns the facts about the model that requests need. Raises Overloaded while the tokenizer is loading."""
        return self._model_context.within(self._limits)

    @cached_property
    def _model_context(self) -> ModelContext:
        return ModelContext.of(self._name, self.service.tokenizer, self._config)

    @property
    def _limits(self) -> Limits | None:
        """Returns the worker's limits; None before a worker has reported them."""
        welcome = self._pool.membership.welcome
        return welcome.limits if welcome else None

    # other routes

    async def tokenize(self, request: Request) -> Response:
        decoded = decode(await self._body(request), TokenizeRequest)
        return _json(await tokenize.tokenize(decoded, self._context()))

    async def tokenizer_info(self, request: Request) -> Response:
        return _json(tokenize.info(self._context()))

    async def detokenize(self, request: Request) -> Response:
        decoded = decode(await self._body(request), tokenize.DetokenizeRequest)
        return _json(await tokenize.detokenize(decoded, self._context()))

    async def input_tokens(self, request: Request) -> Response:
        decoded = decode(await self._body(request), ResponseCountRequest)
        return _json(await responses.count_tokens(decoded, self._context()))

    async def count_tokens(self, request: Request) -> Response:
        decoded = decode(await self._body(request), MessageCountRequest)
        return _json(await messages.count_tokens(decoded, self._context()))

    async def models(self, request: Request) -> Response:
        return _json(models.model_list(self._name, self._created, self._limits))

    async def model(self, request: Request) -> Response:
        return _json(models.find_model(request.path_params["name"], self._name, self._created, self._limits))

    async def health(self, request: Request) -> Response:
        loaded = any(worker.state in SERVING for worker in self._pool.membership.statuses())
        return _json(Health(model_loaded=loaded))

    async def ready(self, request: Request) -> Response:
        readiness = self.service.readiness
        if readiness.ready:
            return _json(Ready())
        workers = self._pool.membership.statuses()
        progress = max((worker.status.progress for worker in workers if worker.status), default=0.0)
        return _json(NotReady(reason=readiness.text, progress=progress), 503, {"Retry-After": "1"})

    async def stats(self, request: Request) -> Response:
        return _json(stats(self._pool.membership.statuses(), self._name, self.service.draining))

    async def metrics(self, request: Request) -> Response:
        text = self._metrics.text(self._pool.counters, self._pool.membership.statuses())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def document(self, request: Request) -> Response:
        return _json(document())


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect."""
    here = asyncio.current_task()
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        if here is not None:
            here.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and here is not None and not here.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
