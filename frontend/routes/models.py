"""Routes that list, describe, load and unload models, in the formats of OpenAI, Ollama, llama.cpp and SGLang.

Each model is listed under each of its names except its path. No response contains a folder of the server.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from frontend.api.llama_cpp import server as llama_cpp
from frontend.api.ollama import models as ollama
from frontend.api.ollama.models import capabilities
from frontend.api.sglang import types
from frontend.api.sglang.generate import weight_version
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, MethodNotAllowed, NotFound, NotSupported, Overloaded
from frontend.model_context import ModelContext, recommended
from frontend.model_table import ModelTable, ServedModel
from frontend.observability import stats as statistics
from frontend.routes import tokenize
from frontend.schema.base import RequestModel, ResponseModel
from frontend.schema.request_fields import doc
from frontend.schema.responses import (
    Accepted,
    Capability,
    LlamaCppModel,
    Model,
    ModelList,
    ModelStatus,
)
from frontend.server.access import check_admin
from frontend.server.middleware import RECORD, RequestRecord
from frontend.workers.status import NO_TOKENIZER, ConnectionState
from shared import build
from shared.launcher_messages import Download, ModelState
from shared.model_list import MOST_NAME_CHARS

HAVE_IT = {ConnectionState.READY, ConnectionState.STALLED, ConnectionState.DRAINING}
WILL_HAVE_IT = {ConnectionState.LOADING, ConnectionState.HANDSHAKE}  # in HANDSHAKE, a worker may just have restarted
CANNOT_SERVE = {ConnectionState.FAILED, ConnectionState.INCOMPATIBLE}


def _progress(download: Download | None) -> float | UnsetType:
    if download is None or download.ended:
        return UNSET
    return round(download.completed / download.total, 3) if download.total else 0.0


def status_of(served: ServedModel, known: ModelState | None = None, download: Download | None = None) -> ModelStatus:
    """Returns whether the model is in memory, which is also the case while its worker drains or stalls.

    If the workers' states differ, the state nearest to serving counts.
    known: the launcher's state of the model, which takes precedence; None if models are not loaded on demand
    download: the launcher's last news of its download, if there was one
    """
    if known is not None:
        value = "loaded" if known.state == "unloading" else known.state
        return ModelStatus(value=value, reason=known.reason or None, on_demand=True, progress=_progress(download))
    readiness = served.service.readiness
    states = {worker.state for worker in served.pool.membership.statuses()}
    reason = None if readiness.ready else readiness.text
    if readiness == NO_TOKENIZER:
        return ModelStatus(value="failed", reason=reason)
    if states & HAVE_IT:
        return ModelStatus(value="loaded" if served.service.has_tokenizer else "loading", reason=reason)
    if states & WILL_HAVE_IT:
        return ModelStatus(value="loading", reason=reason)
    return ModelStatus(value="failed" if states & CANNOT_SERVE else "unloaded", reason=reason)


def model_of(
    name: str,
    served: ServedModel,
    created: int,
    parent: str | None = None,
    known: ModelState | None = None,
    download: Download | None = None,
) -> Model:
    """Describes a model under one of its names.

    created: start of this process, in seconds since 1970
    parent: the base model of an adapter
    """
    context = served.context if served.service.has_tokenizer else None
    longest = served.limits.max_seq_len if served.limits else None
    return Model(
        id=name,
        created=created,
        root=name if served.adapter is None else Path(served.adapter.path).name,
        parent=parent,
        max_model_len=longest,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        max_input_tokens=longest,
        fingerprint=served.fingerprint or None,
        status=status_of(served, known, download),
        capabilities=capabilities(context) if context else None,
        recommended_sampling=dict(recommended(context.tokenizer.generation)) if context else None,
    )


def model_list(table: ModelTable, created: int) -> ModelList:
    downloads: Mapping[str, Download] = table.changes.downloads if table.changes is not None else {}
    models = [
        model_of(name, served, created, known=table.state_of(served.name), download=downloads.get(served.name))
        for served in table
        for name in served.listed_names
    ]
    models += [model_of(one.name, one, created, table.first.name) for one in table.adapters]
    models += [
        model_of(one.name, one, created, one.preset.base if one.preset else None, table.state_of(one.name))
        for one in table.presets
    ]
    return ModelList(
        data=models,
        models=[_for_llama_cpp(one) for one in models],
        first_id=models[0].id,
        last_id=models[-1].id,
        allows_pull=True if table.library is not None else UNSET,
    )


def _for_llama_cpp(model: Model) -> LlamaCppModel:
    names: dict[Capability, Literal["completion", "embedding", "multimodal"]] = {
        "completion": "completion", "embedding": "embedding", "vision": "multimodal",
    }  # fmt: skip
    capabilities = [names[one] for one in model.capabilities or () if one in names]
    return LlamaCppModel(name=model.id, model=model.id, capabilities=capabilities)


def find_model(wanted: str, table: ModelTable, created: int) -> Model:
    """Describes the model of the name `wanted`. Raises NotFound if there is none, unless any name is accepted."""
    served = table.get(wanted)
    if served is None and not table.first.config.any_model_name:
        raise NotFound(f"the model `{wanted}` does not exist", param="model", code="model_not_found")
    parent = table.first.name if served is not None and served.adapter is not None else None
    served = served or table.first
    return model_of(wanted, served, created, parent, table.state_of(served.name))


async def stats(app: AppState, request: Request) -> Response:
    pools = [
        statistics.Pool(model.pool.membership.statuses(), model.name, model.fingerprint_with) for model in app.models
    ]
    return json_response(statistics.stats(pools, app.models.draining, await _batches(app, request)))


async def _batches(app: AppState, request: Request) -> statistics.BatchesWaiting | None:
    """Returns what waits in batches; None without a store, and while it cannot be read."""
    if app.kept is None:
        return None
    from frontend.kept import batches, usage
    from frontend.kept.database import StoreError
    from frontend.routes.kept import tenant_of

    try:
        found = await app.kept.store.read(batches.counts)
        stored = await app.kept.store.read(partial(usage.of_tenant, tenant=tenant_of(request)))
    except StoreError:
        return None
    return statistics.BatchesWaiting(
        batches=found.batches, lines_waiting=found.lines_waiting, lines_running=found.lines_running,
        stored_bytes=stored, max_stored_bytes=app.config.store_max_key_bytes,
    )  # fmt: skip


async def list_models(app: AppState, request: Request) -> Response:
    """Lists the models. With `?reload=1`, the launcher first reads the table of models again.

    Only POST may reload, because a link in a foreign page makes a browser send GET. Raises MethodNotAllowed, and
    Forbidden unless an administrator asks.
    """
    if request.query_params.get("reload") in ("1", "true"):
        if request.method != "POST":
            raise MethodNotAllowed("a reload changes the server: send POST /models?reload=1", allow="POST")
        check_admin(request, "a reload")
        await app.models.reload()
    listed = model_list(app.models, app.created)
    return json_response(replace(listed, data=[_for_client(one, request) for one in listed.data]))


async def get_model(app: AppState, request: Request) -> Response:
    return json_response(_for_client(find_model(request.path_params["name"], app.models, app.created), request))


def _for_client(model: Model, request: Request) -> Model:
    """Returns the model without `capabilities` if Anthropic's SDK asks: there, it is an object of other facts."""
    return replace(model, capabilities=None) if "anthropic-version" in request.headers else model


async def tokenizer_info(app: AppState, request: Request) -> Response:
    return json_response(tokenize.info(app.models.first.context))


def _contexts(app: AppState, served: list[ServedModel]) -> list[ModelContext]:
    """Returns the contexts of these models; if models are loaded on demand, only of the loaded ones."""
    return [one.context for one in served if app.models.state_of(one.name) is None or one.service.has_tokenizer]


async def ollama_tags(app: AppState, request: Request) -> Response:
    models = [*app.models, *app.models.adapters, *app.models.presets]
    contexts = _contexts(app, models)
    known = {context.model for context in contexts}
    unloaded = [model.name for model in models if model.name not in known]
    return json_response(ollama.tags(contexts, app.created, unloaded))


async def ollama_processes(app: AppState, request: Request) -> Response:
    states = [state for model in app.models if (state := app.models.state_of(model.name)) is not None]
    return json_response(ollama.running(_contexts(app, [*app.models]), states))


async def ollama_show(app: AppState, request: Request) -> Response:
    decoded = await app.decode(request, await app.body(request), ollama.ShowRequest)
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


async def llama_cpp_slot_action(app: AppState, request: Request) -> Response:
    """Raises NotSupported: no slot holds a conversation, so there is none to save, restore or erase."""
    raise NotSupported(
        "slots cannot be saved, restored or erased: this server has no fixed slots; with --kv-store it keeps the K/V "
        "of every prompt by itself, also across restarts, and POST /reset_prefix_cache empties it",
        code="no_fixed_slots",
    )


def _slots(model: ServedModel) -> int:
    """Returns how many sequences the workers run at once, which llama.cpp's clients take for slots."""
    return max(1, model.pool.concurrency())


# The routes that load and unload models. They respond at once; /v1/models shows the progress.


async def load_model(app: AppState, request: Request) -> Response:
    """Starts to load a model. Raises NotFound for an unknown name, and BadRequest if the model is already loaded."""
    name, state = await _asked(app, request)
    if state in ("loaded", "loading"):
        raise BadRequest(f"the model `{name}` is {state} already", param="model", code="model_loaded")
    app.models.load(name)
    return json_response(Accepted())


async def unload_model(app: AppState, request: Request) -> Response:
    """Unloads a model as soon as no request needs it. Raises NotFound for an unknown name, BadRequest if not
    loaded."""
    name, state = await _asked(app, request)
    if state not in ("loaded", "loading"):
        raise BadRequest(f"the model `{name}` is not loaded", param="model", code="model_not_loaded")
    app.models.keep(name, 0.0)
    return json_response(Accepted())


async def _asked(app: AppState, request: Request) -> tuple[str, str]:
    """Returns the first name and the state of the model that the body names."""
    check_admin(request)
    written = (await app.decode(request, await app.body(request), ModelRequest)).model
    found = app.models.get(written)
    if found is None:
        raise NotFound(f"the model `{written}` does not exist", param="model", code="model_not_found")
    known = app.models.state_of(found.name)
    if known is None:
        raise BadRequest("this server has one model, which is always loaded", code="not_allowed")
    return found.name, known.state


# Sleep and wake-up, with vLLM's names. A sleeping server has no model in memory, and refuses requests until woken.
#
# Both levels of sleep unload all models. The next load is still quick if the files are in the page cache.

LEVELS = ("1", "2")


async def fall_asleep(app: AppState, request: Request) -> Response:
    """Responds when all models are unloaded. Raises Forbidden unless an administrator asks, and BadRequest for an
    unknown level."""
    check_admin(request, keyed=True)
    if (level := request.query_params.get("level", "1")) not in LEVELS:
        raise BadRequest(f"`level` must be 1 or 2, not {level!r:.40}", param="level", code="out_of_range")
    await app.models.sleep(True)
    return json_response(Sleeping(is_sleeping=True))


async def wake_up(app: AppState, request: Request) -> Response:
    """Responds when requests are accepted again; they then wait for their models. Raises Forbidden unless an
    administrator asks."""
    check_admin(request, keyed=True)
    await app.models.sleep(False)
    return json_response(Sleeping(is_sleeping=False))


async def is_sleeping(app: AppState, request: Request) -> Response:
    return json_response(Sleeping(is_sleeping=app.models.asleep))


# The request and response types of the routes that load and unload models, with the names of llama.cpp's router.


class ModelRequest(RequestModel):
    model: Annotated[str, Meta(min_length=1, max_length=MOST_NAME_CHARS), doc("The name of the model")]


class Sleeping(ResponseModel):
    is_sleeping: bool


# SGLang's routes about the model and the server, and the table of its routes that generate nothing.


async def model_info(app: AppState, request: Request) -> Response:
    model = app.models.first
    context = model.context
    return json_response(
        types.SglangModelInfo(
            model_path=context.model, tokenizer_path=context.model,
            is_generation=context.task.name == "generate",
            preferred_sampling_params=dict(context.recommended) or None,
            weight_version=weight_version(model.fingerprint),
            has_image_understanding=context.tokenizer.image_format is not None,
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
