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

from frontend.api import tokenize
from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_input import MessageCountRequest
from frontend.api.api_formats import API_FORMATS, error_format
from frontend.api.app_state import AppState, json_response
from frontend.api.llama_cpp.apply_template import apply_template, count_tokens
from frontend.api.llama_cpp.tokenize import AnyTokenizeRequest, any_tokenize
from frontend.api.many.routes import load_model, unload_model
from frontend.api.many.sleep import fall_asleep, is_sleeping, wake_up
from frontend.api.model_context import ModelContext
from frontend.api.model_table import ModelTable
from frontend.api.openai import responses
from frontend.api.openai.chat_input import ChatRequest, TemplateRequest
from frontend.api.openai.completions_input import CompletionRequest
from frontend.api.openai.responses_input import ResponseCountRequest
from frontend.api.requests.request_model import RequestModel
from frontend.api.routes import reports
from frontend.api.routes.adapters import default_scales, load_adapter, set_default_scales, unload_adapter
from frontend.api.routes.generate import generate, while_connected
from frontend.api.routes.invocations import invocations
from frontend.api.routes.pooling_route import POOLING_FORMATS, pool
from frontend.api.routes.prefix_cache import reset_prefix_cache
from frontend.api.routes.render import render_chat, render_completion
from frontend.api.routes.sglang import SGLANG_ROUTES
from frontend.api.routes.verify_route import verify
from frontend.observability.access_log import RequestRecord
from frontend.observability.hooks import EndHooks, end_hooks
from frontend.observability.metrics import PrometheusMetrics
from frontend.server import playground
from frontend.server.auth import ApiKeys
from frontend.server.gateway import admission_of
from frontend.server.hosts import Hosts
from frontend.server.middleware import RECORD, RequestMiddleware
from frontend.server.origins import LOCALHOST, OF_THIS_MACHINE, Origins
from shared.config import FrontendConfig, words
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
    ("GET", "/health", reports.health),
    ("GET", "/v1/health", reports.health),
    ("GET", "/ready", reports.ready),
    ("GET", "/ping", reports.health),
    ("POST", "/ping", reports.health),
    ("GET", "/load", reports.load),
    ("GET", "/version", reports.version),
    ("GET", "/stats", reports.stats),
    ("GET", "/metrics", reports.metrics),
    ("GET", "/openapi.json", reports.document),
    ("GET", "/v1/models", reports.model_list),
    ("GET", "/models", reports.model_list),
    ("POST", "/models", reports.model_list),
    ("GET", "/v1/models/{name:path}", reports.model),
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("POST", "/models/load", load_model),
    ("POST", "/models/unload", unload_model),
    ("POST", "/sleep", fall_asleep),
    ("POST", "/wake_up", wake_up),
    ("GET", "/is_sleeping", is_sleeping),
    ("POST", "/v1/load_lora_adapter", load_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_adapter),
    ("GET", "/tokenizer_info", reports.tokenizer_info),
    ("POST", "/tokenize", answering(AnyTokenizeRequest, any_tokenize)),
    ("POST", "/detokenize", answering(tokenize.DetokenizeRequest, tokenize.detokenize)),
    *(("POST", path, generate) for path in API_FORMATS),
    ("POST", "/v1/completions/render", answering(CompletionRequest, render_completion)),
    ("POST", "/v1/chat/completions/render", answering(ChatRequest, render_chat)),
    ("POST", "/invocations", invocations),
    ("GET", "/api/tags", reports.ollama_tags),
    ("GET", "/api/ps", reports.ollama_processes),
    ("POST", "/api/show", reports.ollama_show),
    ("GET", "/api/version", reports.ollama_version),
    *(("POST", path, pool) for path in POOLING_FORMATS),
    ("POST", "/apply-template", answering(TemplateRequest, apply_template)),
    ("POST", "/v1/chat/completions/input_tokens", answering(TemplateRequest, count_tokens)),
    ("POST", "/chat/completions/input_tokens", answering(TemplateRequest, count_tokens)),
    ("GET", "/props", reports.llama_cpp_props),
    ("GET", "/slots", reports.llama_cpp_slots),
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
    from frontend.api.many.loading_comments import LoadingComments

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
