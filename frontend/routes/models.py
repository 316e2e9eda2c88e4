"""The list of models, with OpenAI's and Anthropic's fields.

Each model is listed under each of its names but its path. Neither a list nor a model tells a folder of the server.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from frontend.api.model_table import ModelTable, ServedModel
from frontend.api.ollama.models import capabilities
from frontend.api.recommended import recommended
from frontend.api.requests.response_types import Capability, LlamaCppModel, Model, ModelList, ModelStatus
from frontend.errors import NotFound
from frontend.workers.status import NO_TOKENIZER, ConnectionState
from shared.models.messages import ModelState

HAVE_IT = {ConnectionState.READY, ConnectionState.STALLED, ConnectionState.DRAINING}
WILL_HAVE_IT = {ConnectionState.LOADING, ConnectionState.HANDSHAKE}  # in HANDSHAKE, a worker may just have restarted
CANNOT_SERVE = {ConnectionState.FAILED, ConnectionState.INCOMPATIBLE}


def status_of(served: ServedModel, known: ModelState | None = None) -> ModelStatus:
    """Returns whether the model is in memory, which is also the case while its worker drains or stalls.

    If the workers' states differ, the state nearest to serving counts.
    known: the launcher's state of the model, which takes precedence; None if models are not loaded on demand
    """
    if known is not None:
        return ModelStatus(value="loaded" if known.state == "unloading" else known.state, reason=known.reason or None)
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
    name: str, served: ServedModel, created: int, parent: str | None = None, known: ModelState | None = None
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
        status=status_of(served, known),
        capabilities=capabilities(context) if context else None,
        recommended_sampling=dict(recommended(context.tokenizer.generation)) if context else None,
    )


def model_list(table: ModelTable, created: int) -> ModelList:
    models = [
        model_of(name, served, created, known=table.state_of(served.name))
        for served in table
        for name in served.listed_names
    ]
    models += [model_of(one.name, one, created, table.first.name) for one in table.adapters]
    return ModelList(
        data=models, models=[_for_llama_cpp(one) for one in models], first_id=models[0].id, last_id=models[-1].id
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
