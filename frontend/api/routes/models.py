"""The list of models: each under each of its names, with OpenAI's and Anthropic's fields."""

from datetime import UTC, datetime

from frontend.api.model_table import ModelTable, ServedModel
from frontend.api.requests.response_types import Model, ModelList
from frontend.errors import NotFound


def model_of(name: str, served: ServedModel, created: int, parent: str | None = None) -> Model:
    """Describes a model under one of its names; `created` is the start of this process, in seconds since 1970.

    parent: the base model of an adapter
    """
    longest = served.limits.max_seq_len if served.limits else None
    return Model(
        id=name,
        created=created,
        root=name if served.adapter is None else served.adapter.path,
        parent=parent,
        max_model_len=longest,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        max_input_tokens=longest,
        fingerprint=served.fingerprint or None,
    )


def model_list(table: ModelTable, created: int) -> ModelList:
    models = [model_of(name, served, created) for served in table for name in served.names]
    models += [model_of(one.name, one, created, table.first.name) for one in table.adapters]
    return ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)


def find_model(wanted: str, table: ModelTable, created: int) -> Model:
    """Describes the model that has the name `wanted`. Raises NotFound if none has it, and the first accepts only its
    own names."""
    served = table.get(wanted)
    if served is None and not table.first.config.any_model_name:
        raise NotFound(f"the model `{wanted}` does not exist", param="model", code="model_not_found")
    parent = table.first.name if served is not None and served.adapter is not None else None
    return model_of(wanted, served or table.first, created, parent)
