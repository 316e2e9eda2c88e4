"""The app: the table of its routes, and the background tasks that run as long as the app.

The app can be created, and its port opened, before the tokenizer is loaded or a worker is connected. Until then, the
routes that need them respond with 503, and `/ready` says what is missing.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.api.formats import API_FORMATS, MODULES, error_format
from frontend.app_state import AppState
from frontend.errors import MethodNotAllowed, NotFound
from frontend.model_table import ModelTable
from frontend.observability.hooks import EndHooks, end_hooks
from frontend.observability.metrics import PrometheusMetrics
from frontend.routes.pooling import POOLING_FORMATS
from frontend.server import playground
from frontend.server.access import LOCALHOST, OF_THIS_MACHINE, ApiKeys, Hosts, Origins, admission_of
from frontend.server.middleware import RECORD, Live, RequestMiddleware, RequestRecord
from shared.config.declaration import words
from shared.config.frontend import FrontendConfig
from shared.signing import Signer

if TYPE_CHECKING:
    from frontend.kept.kept import Kept

FLUSH_S = 1.0
LAG_S = 0.05  # pause between two measurements of the event loop's lag

Handler = Callable[[AppState, Request], Awaitable[Response]]

# Method, path, and the handler as module:function. A module is imported by the first request of one of its routes.
ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", "/health", "frontend.routes.health:health"),
    ("GET", "/v1/health", "frontend.routes.health:health"),
    ("GET", "/ready", "frontend.routes.health:ready"),
    ("GET", "/ping", "frontend.routes.health:health"),
    ("POST", "/ping", "frontend.routes.health:health"),
    ("GET", "/load", "frontend.routes.health:load"),
    ("GET", "/version", "frontend.routes.health:version"),
    ("GET", "/stats", "frontend.routes.models:stats"),
    ("GET", "/metrics", "frontend.routes.health:metrics"),
    ("GET", "/openapi.json", "frontend.routes.openapi:openapi_json"),
    ("GET", "/v1/models", "frontend.routes.models:list_models"),
    ("GET", "/models", "frontend.routes.models:list_models"),
    ("POST", "/models", "frontend.routes.models:list_models"),
    ("GET", "/v1/models/{name:path}", "frontend.routes.models:get_model"),
    ("POST", "/reset_prefix_cache", "frontend.routes.health:reset_prefix_cache"),
    ("POST", "/models/load", "frontend.routes.models:load_model"),
    ("POST", "/models/unload", "frontend.routes.models:unload_model"),
    ("POST", "/sleep", "frontend.routes.models:fall_asleep"),
    ("POST", "/wake_up", "frontend.routes.models:wake_up"),
    ("GET", "/is_sleeping", "frontend.routes.models:is_sleeping"),
    ("POST", "/v1/load_lora_adapter", "frontend.routes.lora:load_adapter"),
    ("POST", "/v1/unload_lora_adapter", "frontend.routes.lora:unload_adapter"),
    ("GET", "/tokenizer_info", "frontend.routes.models:tokenizer_info"),
    ("POST", "/tokenize", "frontend.routes.tokenize:post_tokenize"),
    ("POST", "/v1/tokenize", "frontend.routes.tokenize:post_tokenize"),
    ("POST", "/detokenize", "frontend.routes.tokenize:post_detokenize"),
    ("POST", "/v1/detokenize", "frontend.routes.tokenize:post_detokenize"),
    *(("POST", path, "frontend.routes.generate:generate") for path in API_FORMATS),
    ("POST", "/v1/completions/render", "frontend.routes.tokenize:post_completion"),
    ("POST", "/v1/chat/completions/render", "frontend.routes.tokenize:post_chat"),
    ("POST", "/v1/responses/render", "frontend.routes.tokenize:post_response"),
    ("POST", "/v1/messages/render", "frontend.routes.tokenize:post_message"),
    ("POST", "/invocations", "frontend.routes.verify:invocations"),
    ("POST", "/", "frontend.routes.verify:invocations"),
    ("GET", "/api/tags", "frontend.routes.models:ollama_tags"),
    ("GET", "/api/ps", "frontend.routes.models:ollama_processes"),
    ("POST", "/api/show", "frontend.routes.models:ollama_show"),
    ("POST", "/api/pull", "frontend.routes.library:pull"),
    ("POST", "/api/create", "frontend.routes.library:create"),
    ("HEAD", "/api/blobs/{digest}", "frontend.routes.blobs:look"),
    ("POST", "/api/blobs/{digest}", "frontend.routes.blobs:upload"),
    ("POST", "/api/copy", "frontend.routes.library:copy"),
    ("DELETE", "/api/delete", "frontend.routes.library:delete"),
    ("GET", "/models/sse", "frontend.routes.library:changes"),
    ("GET", "/api/version", "frontend.routes.models:ollama_version"),
    *(("POST", path, "frontend.routes.pooling:pool") for path in POOLING_FORMATS),
    ("POST", "/apply-template", "frontend.routes.tokenize:post_template"),
    ("POST", "/v1/chat/completions/input_tokens", "frontend.routes.tokenize:post_chat_tokens"),
    ("POST", "/chat/completions/input_tokens", "frontend.routes.tokenize:post_chat_tokens"),
    ("GET", "/props", "frontend.routes.models:llama_cpp_props"),
    ("GET", "/slots", "frontend.routes.models:llama_cpp_slots"),
    ("POST", "/slots/{id}", "frontend.routes.models:llama_cpp_slot_action"),
    ("GET", "/model_info", "frontend.routes.models:model_info"),
    ("GET", "/get_model_info", "frontend.routes.models:model_info"),
    ("GET", "/server_info", "frontend.routes.models:server_info"),
    ("GET", "/get_server_info", "frontend.routes.models:server_info"),
    ("GET", "/health_generate", "frontend.routes.health:ready"),
    ("GET", "/flush_cache", "frontend.routes.health:reset_prefix_cache"),
    ("POST", "/flush_cache", "frontend.routes.health:reset_prefix_cache"),
    ("GET", "/lora-adapters", "frontend.routes.lora:default_scales"),
    ("POST", "/lora-adapters", "frontend.routes.lora:set_default_scales"),
    ("POST", "/v1/receipts/verify", "frontend.routes.verify:verify"),
    *(("GET", path, "frontend.routes.responses_socket:connect") for path in ("/v1/responses", "/responses")),
    ("GET", "/v1/responses/{id}", "frontend.routes.kept:get_response"),
    ("DELETE", "/v1/responses/{id}", "frontend.routes.kept:delete_response"),
    ("POST", "/v1/responses/compact", "frontend.routes.kept:compact"),
    ("POST", "/v1/responses/{id}/cancel", "frontend.routes.kept:cancel_response"),
    ("GET", "/v1/responses/{id}/input_items", "frontend.routes.kept:input_items"),
    ("POST", "/v1/conversations", "frontend.routes.conversations:create"),
    ("GET", "/v1/conversations/{id}", "frontend.routes.conversations:get"),
    ("POST", "/v1/conversations/{id}", "frontend.routes.conversations:update"),
    ("DELETE", "/v1/conversations/{id}", "frontend.routes.conversations:delete"),
    ("GET", "/v1/conversations/{id}/items", "frontend.routes.conversations:list_items"),
    ("POST", "/v1/conversations/{id}/items", "frontend.routes.conversations:add_items"),
    ("GET", "/v1/conversations/{id}/items/{item}", "frontend.routes.conversations:get_item"),
    ("DELETE", "/v1/conversations/{id}/items/{item}", "frontend.routes.conversations:delete_item"),
    ("GET", "/v1/files", "frontend.routes.files:list_files"),
    ("POST", "/v1/files", "frontend.routes.files:upload"),
    ("GET", "/v1/files/{id}", "frontend.routes.files:get"),
    ("DELETE", "/v1/files/{id}", "frontend.routes.files:delete"),
    ("GET", "/v1/files/{id}/content", "frontend.routes.files:content"),
    ("GET", "/v1/batches", "frontend.routes.batches:list_batches"),
    ("POST", "/v1/batches", "frontend.routes.batches:create"),
    ("GET", "/v1/batches/{id}", "frontend.routes.batches:get"),
    ("POST", "/v1/batches/{id}/cancel", "frontend.routes.batches:cancel"),
    ("GET", "/v1/messages/batches", "frontend.routes.batches:list_messages"),
    ("POST", "/v1/messages/batches", "frontend.routes.batches:create_messages"),
    ("GET", "/v1/messages/batches/{id}", "frontend.routes.batches:get_messages"),
    ("DELETE", "/v1/messages/batches/{id}", "frontend.routes.batches:delete_messages"),
    ("POST", "/v1/messages/batches/{id}/cancel", "frontend.routes.batches:cancel_messages"),
    ("GET", "/v1/messages/batches/{id}/results", "frontend.routes.batches:results"),
    ("GET", "/v1/streams", "frontend.routes.kept:list_streams"),
    ("GET", "/v1/stream", "frontend.routes.kept:get_stream"),
    ("DELETE", "/v1/stream", "frontend.routes.kept:delete_stream"),
    ("GET", "/v1/stream/{id:path}", "frontend.routes.kept:get_stream"),
    ("DELETE", "/v1/stream/{id:path}", "frontend.routes.kept:delete_stream"),
    ("POST", "/v1/responses/input_tokens", "frontend.routes.input_tokens:of_response"),
    ("POST", "/v1/messages/count_tokens", "frontend.routes.input_tokens:of_messages"),
)


def create_app(config: FrontendConfig, models: ModelTable, metrics: PrometheusMetrics) -> Starlette:
    """Creates the ASGI application. Its lifespan starts and closes the pools of `models` (also `app.state.models`).

    Raises ConfigError if the file of API keys, the signing key of receipts or --objectives cannot be used.
    """
    ended = end_hooks(config, metrics)
    kept = None
    if config.keeps:
        from frontend.kept.kept import Kept

        kept = Kept(config)
    state = AppState(config, models, metrics, Signer.load(config.receipt_key), kept)
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
        live=(live := Live()),
    )
    found = routes(state)
    app = Starlette(
        routes=found,
        middleware=[
            *_cors(origins),
            requests,
            *_comments_while_loading(config, models),
            Middleware(ExactRoutes, routes=found),
        ],
        lifespan=_lifespan(state, ended, live),
        exception_handlers={HTTPException: _pass_on},
    )
    app.router.redirect_slashes = False
    app.state.models, app.state.kept = models, kept
    return app


def routes(state: AppState) -> list[Route]:
    """Returns the routes of ROUTES and those of the playground page. The page's routes need no AppState."""
    return [
        Route("/", playground.page),
        Route("/web/{name:path}", playground.page),
        *(Route(path, partial(_dispatch, handler, state), methods=[method]) for method, path, handler in ROUTES),
    ]


class ExactRoutes:
    """Finds the route of a path without parameters in a table, and leaves other requests to the router, which compares
    a path with one route after another. A handler's exceptions go on to the middleware outside, as _pass_on says."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self.exact: dict[tuple[str, str], Route] = {}
        for route in routes:
            for method in () if route.param_convertors else route.methods or ():
                self.exact.setdefault((method, route.path), route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.exact.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None or scope.get("root_path"):
            return await self._app(scope, receive, send)
        scope.update(endpoint=route.endpoint, path_params={}, route=route)
        await route.app(scope, receive, send)


def _ended(ended: EndHooks, record: RequestRecord) -> None:
    try:
        ended(record)
    finally:
        # a connection, its scope and this record hold one another until the garbage collector finds them
        record.body, record.generation_request, record.generation = b"", None, None
        record.release()


async def _dispatch(handler: str, state: AppState, request: Request) -> Response:
    module, _, function = handler.partition(":")
    answer: Handler = getattr(await MODULES.soon(module), function)
    try:
        return await answer(state, request)
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
    """Raises the exception again, so that the middleware makes the response of it, and names what is not there.

    The router knows the methods of the first route that has the path. A path has a route for each of its methods.
    """
    method, path = request.method, request.url.path
    fitting = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    status = cast(HTTPException, exc).status_code
    if status == 405:
        allowed = sorted({name for route in fitting for name in route.methods})
        raise MethodNotAllowed(f"{path!r:.80} takes {', '.join(allowed)}, not {method}", allow=", ".join(allowed))
    if status == 404 and not fitting:
        raise NotFound(f"there is no route {method} {path!r:.80}")
    raise exc


def _start_kept(kept: "Kept", state: AppState, ended: EndHooks, live: Live) -> None:
    from frontend.routes import batches
    from frontend.routes.batches import Lines
    from frontend.routes.kept import resume

    def ready() -> bool:
        return state.models.readiness.ready and not state.models.draining

    state.metrics.stored = lambda: kept.stored
    kept.start(partial(resume, state), lambda: state.models.readiness.ready)
    lines = Lines(Router(routes(state)), partial(error_format, config=state.config), partial(_ended, ended))
    kept.batches.start(lines, batches.formats(state.config), ready, lambda: live.count > 0, state.metrics.batch_lines)


def _lifespan(state: AppState, ended: EndHooks, live: Live) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        models, metrics, kept = state.models, state.metrics, state.kept
        await models.start()
        if kept is not None:
            _start_kept(kept, state, ended, live)
        tasks = [asyncio.create_task(_flush(models, metrics)), asyncio.create_task(_watch_lag(metrics))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await models.close()
            if kept is not None:
                await kept.close()
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
