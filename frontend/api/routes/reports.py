"""The routes that report the server's health, statistics, models and API description."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api import tokenize
from frontend.api.app_state import AppState, json_response
from frontend.api.llama_cpp import server as llama_cpp
from frontend.api.model_context import ModelContext
from frontend.api.model_table import ServedModel
from frontend.api.ollama import models as ollama
from frontend.api.requests.response_types import Health, Load, NotReady, Ready, Version
from frontend.api.routes import models, openapi
from frontend.errors import MethodNotAllowed, Overloaded
from frontend.observability import stats as statistics
from frontend.observability.access_log import RequestRecord
from frontend.server.auth import administers, check_admin
from frontend.server.middleware import RECORD
from frontend.workers.status import ConnectionState
from shared import build

SERVING = (ConnectionState.READY, ConnectionState.DRAINING)  # states in which the model is loaded


async def health(app: AppState, request: Request) -> Response:
    pools = [model.pool.membership.statuses() for model in app.models]
    each = [any(worker.state in SERVING for worker in workers) for workers in pools]
    # If models are loaded on demand, one loaded model suffices; otherwise, all models must be loaded.
    loaded = any(each) if app.models.state_of(app.models.first.name) is not None else all(each)
    return json_response(Health(model_loaded=loaded))


async def ready(app: AppState, request: Request) -> Response:
    readiness = app.models.readiness
    if readiness.ready and not app.models.first.service.has_tokenizer:  # no model is loaded yet
        return json_response(Ready(task="generate", chat=False))
    if readiness.ready:
        context = app.models.first.context
        return json_response(Ready(task=context.task.name, chat=bool(context.template)))
    pools = [model.pool.membership.statuses() for model in app.models]
    progress = min(
        max((worker.status.progress for worker in workers if worker.status), default=0.0) for workers in pools
    )
    return json_response(NotReady(reason=readiness.text, progress=progress), 503, {"Retry-After": "1"})


async def version(app: AppState, request: Request) -> Response:
    return json_response(Version(version=build.version()))


async def load(app: AppState, request: Request) -> Response:
    """Returns the number of running requests of this frontend, under vLLM's name."""
    return json_response(Load(server_load=sum(len(model.service.generations) for model in app.models)))


async def stats(app: AppState, request: Request) -> Response:
    pools = [
        statistics.Pool(model.pool.membership.statuses(), model.name, model.fingerprint_with) for model in app.models
    ]
    return json_response(statistics.stats(pools, app.models.draining))


async def metrics(app: AppState, request: Request) -> Response:
    """Returns the metrics. Other keys are named only to administrators."""
    app.models.flush_metrics()
    record: RequestRecord = request.scope[RECORD]
    reader = None if administers(request) else record.tenant
    kind, started = "text/plain; version=0.0.4; charset=utf-8", {"Process-Start-Time-Unix": str(app.created)}
    return Response(app.metrics.text(reader), media_type=kind, headers=started)


async def document(app: AppState, request: Request) -> Response:
    return json_response(openapi.document())


async def model_list(app: AppState, request: Request) -> Response:
    """Lists the models. With `?reload=1`, the launcher first reads the table of models again.

    Only POST may reload, because a link in a foreign page makes a browser send GET. Raises MethodNotAllowed, and
    Forbidden unless an administrator asks.
    """
    if request.query_params.get("reload") in ("1", "true"):
        if request.method != "POST":
            raise MethodNotAllowed("a reload changes the server: send POST /models?reload=1", allow="POST")
        check_admin(request, "a reload")
        await app.models.reload()
    return json_response(models.model_list(app.models, app.created))


async def model(app: AppState, request: Request) -> Response:
    return json_response(models.find_model(request.path_params["name"], app.models, app.created))


async def tokenizer_info(app: AppState, request: Request) -> Response:
    return json_response(tokenize.info(app.models.first.context))


def _contexts(app: AppState, served: list[ServedModel]) -> list[ModelContext]:
    """Returns the contexts of these models; if models are loaded on demand, only of the loaded ones."""
    return [one.context for one in served if app.models.state_of(one.name) is None or one.service.has_tokenizer]


async def ollama_tags(app: AppState, request: Request) -> Response:
    contexts = _contexts(app, [*app.models, *app.models.adapters])
    known = {context.model for context in contexts}
    unloaded = [model.name for model in app.models if model.name not in known]
    return json_response(ollama.tags(contexts, app.created, unloaded))


async def ollama_processes(app: AppState, request: Request) -> Response:
    states = [state for model in app.models if (state := app.models.state_of(model.name)) is not None]
    return json_response(ollama.running(_contexts(app, [*app.models]), states))


async def ollama_show(app: AppState, request: Request) -> Response:
    decoded = app.decode(request, await app.body(request), ollama.ShowRequest)
    name = decoded.model or decoded.name
    context = (await app.models.usable(app.models.find(name), name, computing=False)).context
    return json_response(ollama.show(decoded, context, app.created))


async def ollama_version(app: AppState, request: Request) -> Response:
    return json_response(ollama.version())


async def llama_cpp_props(app: AppState, request: Request) -> Response:
    model = app.models.first
    return json_response(llama_cpp.props(model.context, _slots(model)))


async def llama_cpp_slots(app: AppState, request: Request) -> Response:
    """Lists llama.cpp's slots. With `?fail_on_no_slot=1`, raises Overloaded if no slot is free."""
    record: RequestRecord = request.scope[RECORD]
    model = app.models.first
    context, total = model.context, _slots(model)
    statuses = [worker.status for worker in model.pool.membership.statuses() if worker.status]
    taken = sum(one.running + one.waiting for one in statuses)
    if request.query_params.get("fail_on_no_slot") and 0 < model.pool.concurrency() <= taken:
        raise Overloaded("no slot is available", code="queue_full", retry_after=1.0)
    own = [
        choice.stream
        for generation in model.service.generations
        for choice in generation.choices
        if not choice.done and choice.stream.submit.tenant.partition("/")[0] == record.tenant
    ]
    return json_response(llama_cpp.slots(context, total, own))


def _slots(model: ServedModel) -> int:
    """Returns how many sequences the workers run at once, which llama.cpp's clients take for slots."""
    return max(1, model.pool.concurrency())
