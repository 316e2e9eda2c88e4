"""The app: the table of its routes, and the background tasks that run as long as the app.

The app can be created, and its port opened, before the tokenizer is loaded or a worker is connected. Until then, the
routes that need them respond with 503, and `/ready` says what is missing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_request import MessageCountRequest
from frontend.api.formats import API_FORMATS, error_format
from frontend.api.openai import responses
from frontend.api.openai.chat_request import ChatRequest, TemplateRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseCountRequest
from frontend.app_state import AppState, json_response
from frontend.model_context import ModelContext
from frontend.model_table import ModelTable
from frontend.observability.access_log import RequestRecord
from frontend.observability.hooks import EndHooks, end_hooks
from frontend.observability.metrics import PrometheusMetrics
from frontend.routes import health, models, openapi, tokenize
from frontend.routes.generate import generate, while_connected
from frontend.routes.health import reset_prefix_cache
from frontend.routes.lora import default_scales, load_adapter, set_default_scales, unload_adapter
from frontend.routes.models import SGLANG_ROUTES, fall_asleep, is_sleeping, load_model, unload_model, wake_up
from frontend.routes.pooling import POOLING_FORMATS, pool
from frontend.routes.tokenize import (
    AnyTokenizeRequest,
    any_tokenize,
    apply_template,
    count_tokens,
    render_chat,
    render_completion,
)
from frontend.routes.verify import invocations, verify
from frontend.schema.base import RequestModel
from frontend.server import playground
from frontend.server.access import LOCALHOST, OF_THIS_MACHINE, ApiKeys, Hosts, Origins, admission_of
from frontend.server.middleware import RECORD, RequestMiddleware
from shared.config.declaration import words
from shared.config.frontend import FrontendConfig
from shared.signing import Signer

FLUSH_S = 1.0
LAG_S = 0.05  # pause between two measurements of the event loop's lag

Handler = Callable[[AppState, Request], Awaitable[Response]]
R = TypeVar("R", bound=RequestModel)


def answering(kind: type[R], function: Callable[[R, ModelContext], Coroutine[Any, Any, Any]]) -> Handler:
    """Returns a route handler that decodes the body into `kind`, calls `function` and responds with its result."""

    async def handler(app: AppState, request: Request) -> Response:
        decoded = app.decode(request, await app.body(request), kind)
        model = await app.usable_model(request, decoded, computing=False)
        return json_response(await while_connected(request, function(decoded, model.context)))

    return handler


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", health.health),
    ("GET", "/v1/health", health.health),
    ("GET", "/ready", health.ready),
    ("GET", "/ping", health.health),
    ("POST", "/ping", health.health),
    ("GET", "/load", health.load),
    ("GET", "/version", health.version),
    ("GET", "/stats", models.stats),
    ("GET", "/metrics", health.metrics),
    ("GET", "/openapi.json", openapi.openapi_json),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/models", models.list_models),
    ("POST", "/models", models.list_models),
    ("GET", "/v1/models/{name:path}", models.get_model),
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("POST", "/models/load", load_model),
    ("POST", "/models/unload", unload_model),
    ("POST", "/sleep", fall_asleep),
    ("POST", "/wake_up", wake_up),
    ("GET", "/is_sleeping", is_sleeping),
    ("POST", "/v1/load_lora_adapter", load_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_adapter),
    ("GET", "/tokenizer_info", models.tokenizer_info),
    ("POST", "/tokenize", answering(AnyTokenizeRequest, any_tokenize)),
    ("POST", "/detokenize", answering(tokenize.DetokenizeRequest, tokenize.detokenize)),
    *(("POST", path, generate) for path in API_FORMATS),
    ("POST", "/v1/completions/render", answering(CompletionRequest, render_completion)),
    ("POST", "/v1/chat/completions/render", answering(ChatRequest, render_chat)),
    ("POST", "/invocations", invocations),
    ("GET", "/api/tags", models.ollama_tags),
    ("GET", "/api/ps", models.ollama_processes),
    ("POST", "/api/show", models.ollama_show),
    ("GET", "/api/version", models.ollama_version),
    *(("POST", path, pool) for path in POOLING_FORMATS),
    ("POST", "/apply-template", answering(TemplateRequest, apply_template)),
    ("POST", "/v1/chat/completions/input_tokens", answering(TemplateRequest, count_tokens)),
    ("POST", "/chat/completions/input_tokens", answering(TemplateRequest, count_tokens)),
    ("GET", "/props", models.llama_cpp_props),
    ("GET", "/slots", models.llama_cpp_slots),
    *SGLANG_ROUTES,
    ("GET", "/lora-adapters", default_scales),
    ("POST", "/lora-adapters", set_default_scales),
    ("POST", "/v1/receipts/verify", verify),
    ("POST", "/v1/responses/input_tokens", answering(ResponseCountRequest, responses.count_tokens)),
    ("POST", "/v1/messages/count_tokens", answering(MessageCountRequest, messages.count_tokens)),
)


def create_app(config: FrontendConfig, models: ModelTable, metrics: PrometheusMetrics) -> Starlette:
    """Creates the ASGI application. Its lifespan starts and closes the pools of `models` (also `app.state.models`).

    Raises ConfigError if the file of API keys, the signing key of receipts or --objectives cannot be used.
    """
    ended = end_hooks(config, metrics)
    state = AppState(config, models, metrics, Signer.load(config.receipt_key))
    origins = words(config.cors_origins)
    requests = Middleware(
        RequestMiddleware,
        keys=ApiKeys(config.api_keys, words(config.api_key), config.admin_keys),
        hosts=Hosts.of(config),
        origins=Origins(origins),
        admission=admission_of(config),
        envelope=partial(error_format, config=config),
        rejected=metrics.rejected,
        ended=partial(_ended, ended),
    )
    app = Starlette(
        routes=routes(state),
        middleware=[*_cors(origins), requests, *_comments_while_loading(config, models)],
        lifespan=_lifespan(models, metrics, ended),
        exception_handlers={HTTPException: _pass_on},
    )
    app.router.redirect_slashes = False
    app.state.models = models
    return app


def routes(state: AppState) -> list[Route]:
    """Returns the routes of ROUTES and those of the playground page. The page's routes need no AppState."""
    return [
        Route("/", playground.page),
        Route("/web/{name:path}", playground.page),
        *(Route(path, partial(_answered, handler, state), methods=[method]) for method, path, handler in ROUTES),
    ]


def _ended(ended: EndHooks, record: RequestRecord) -> None:
    try:
        ended(record)
    finally:
        record.body = b""
        record.release()


async def _answered(handler: Handler, state: AppState, request: Request) -> Response:
    try:
        return await handler(state, request)
    finally:
        if not request.scope[RECORD].body:  # else the record keeps the body until the request has ended
            state.bodies.release(request)


def _cors(origins: list[str]) -> list[Middleware]:
    """Returns the CORS middleware, which lets pages of these origins read responses and their headers."""
    if not origins:
        return []
    every = ["*"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=OF_THIS_MACHINE if LOCALHOST in origins else None,
            allow_methods=every,
            allow_headers=every,
            expose_headers=every,
            allow_private_network=True,
        )
    ]


def _comments_while_loading(config: FrontendConfig, models: ModelTable) -> list[Middleware]:
    if models.waited_for is None:
        return []
    from frontend.launcher_link import LoadingComments

    return [Middleware(LoadingComments, waiting=models.waited_for, keepalive_s=config.keepalive_s)]


def _pass_on(request: Request, exc: Exception) -> Response:
    raise exc  # the middleware makes the response from the exception


def _lifespan(
    models: ModelTable, metrics: PrometheusMetrics, ended: EndHooks
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await models.start()
        tasks = [asyncio.create_task(_flush(models, metrics)), asyncio.create_task(_watch_lag(metrics))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await models.close()
            await asyncio.to_thread(ended.close)

    return lifespan


async def _flush(models: ModelTable, metrics: PrometheusMetrics) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        models.flush_metrics()
        metrics.flush()


async def _watch_lag(metrics: PrometheusMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_S
        await asyncio.sleep(LAG_S)
        metrics.loop_lag(max(0.0, loop.time() - due))
