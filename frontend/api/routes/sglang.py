"""SGLang's routes about the model and the server, and the table of its routes that generate nothing."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.routes import reports
from frontend.api.routes.prefix_cache import reset_prefix_cache
from frontend.api.sglang import response_types as types
from frontend.api.sglang.output import weight_version
from shared import build


async def model_info(app: AppState, request: Request) -> Response:
    model = app.models.first
    context = model.context
    return json_response(
        types.SglangModelInfo(
            model_path=context.model, tokenizer_path=context.model,
            is_generation=context.task.name == "generate",
            preferred_sampling_params=dict(context.recommended) or None,
            weight_version=weight_version(model.fingerprint),
            has_image_understanding=context.tokenizer.pictures is not None,
        )
    )  # fmt: skip


async def server_info(app: AppState, request: Request) -> Response:
    model = app.models.first
    context = model.context
    statuses = [worker.status for worker in model.pool.membership.statuses() if worker.status]
    return json_response(
        types.SglangServerInfo(
            model_path=context.model, tokenizer_path=context.model, served_model_name=context.model,
            context_length=context.max_seq_len or None, max_running_requests=max(1, model.pool.concurrency()),
            is_embedding=context.task.name != "generate", version=build.version(),
            internal_states=[types.SglangState(last_gen_throughput=one.generation_tokens_s) for one in statuses],
        )
    )  # fmt: skip


SGLANG_ROUTES: tuple[tuple[str, str, Callable[[AppState, Request], Awaitable[Response]]], ...] = (
    ("GET", "/model_info", model_info),
    ("GET", "/get_model_info", model_info),
    ("GET", "/server_info", server_info),
    ("GET", "/get_server_info", server_info),
    ("GET", "/health_generate", reports.ready),
    ("GET", "/flush_cache", reset_prefix_cache),
    ("POST", "/flush_cache", reset_prefix_cache),
)
