"""The list of models: the served one under each of its names, with OpenAI's and Anthropic's fields."""

from collections.abc import Sequence
from datetime import UTC, datetime

from frontend.api.response_types import Model, ModelList
from frontend.errors import NotFound
from shared.messages import Limits


def model_of(name: str, created: int, limits: Limits | None, fingerprint: str) -> Model:
    """Describes the served model; `created` is the start of this process, in seconds since 1970."""
    longest = limits.max_seq_len if limits else None
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=longest,
        display_name=name,
        created_at=datetime.fromtimestamp(created, UTC).isoformat(),
        max_input_tokens=longest,
        fingerprint=fingerprint or None,
    )


def model_list(names: Sequence[str], created: int, limits: Limits | None, fingerprint: str) -> ModelList:
    models = [model_of(name, created, limits, fingerprint) for name in names]
    return ModelList(data=models, first_id=names[0], last_id=names[-1])


def find_model(wanted: str, names: Sequence[str], created: int, limits: Limits | None, fingerprint: str) -> Model:
    """Returns the served model under one of its names. Raises NotFound for any other name."""
    if wanted not in names:
        raise NotFound(f"the model `{wanted}` does not exist", param="model", code="model_not_found")
    return model_of(wanted, created, limits, fingerprint)
