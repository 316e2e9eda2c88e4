"""The routes that report: whether the server is well, what it does, which model it has, what its interface is."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api import models, openapi, tokenize
from frontend.api.app_state import AppState, json_response
from frontend.api.ollama import models as ollama
from frontend.api.response_types import Health, NotReady, Ready, Version
from frontend.observability import stats as statistics
from frontend.workers.status import ConnectionState
from shared import build

SERVING = (ConnectionState.READY, ConnectionState.DRAINING)  # the model is loaded


async def health(app: AppState, request: Request) -> Response:
    loaded = any(worker.state in SERVING for worker in app.pool.membership.statuses())
    return json_response(Health(model_loaded=loaded))


async def ready(app: AppState, request: Request) -> Response:
    readiness = app.service.readiness
    if readiness.ready:
        return json_response(Ready(task=app.context.task.name))
    workers = app.pool.membership.statuses()
    progress = max((worker.status.progress for worker in workers if worker.status), default=0.0)
    return json_response(NotReady(reason=readiness.text, progress=progress), 503, {"Retry-After": "1"})


async def version(app: AppState, request: Request) -> Response:
    return json_response(Version(version=build.version()))


async def stats(app: AppState, request: Request) -> Response:
    workers = app.pool.membership.statuses()
    return json_response(statistics.stats(workers, app.names[0], app.service.draining, app.fingerprint_with))


async def metrics(app: AppState, request: Request) -> Response:
    text = app.metrics.text(app.pool.counters, app.pool.membership.statuses())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def document(app: AppState, request: Request) -> Response:
    return json_response(openapi.document())


async def model_list(app: AppState, request: Request) -> Response:
    return json_response(models.model_list(app.names, app.created, app.limits, app.fingerprint))


async def model(app: AppState, request: Request) -> Response:
    wanted = request.path_params["name"]
    names = (*app.names, wanted) if app.config.any_model_name else app.names
    return json_response(models.find_model(wanted, names, app.created, app.limits, app.fingerprint))


async def tokenizer_info(app: AppState, request: Request) -> Response:
    return json_response(tokenize.info(app.context))


async def ollama_tags(app: AppState, request: Request) -> Response:
    return json_response(ollama.tags(app.context, app.created))


async def ollama_processes(app: AppState, request: Request) -> Response:
    return json_response(ollama.running(app.context))


async def ollama_show(app: AppState, request: Request) -> Response:
    decoded = app.decode(request, await app.body(request), ollama.ShowRequest)
    return json_response(ollama.show(decoded, app.context, app.created))


async def ollama_version(app: AppState, request: Request) -> Response:
    return json_response(ollama.version())
