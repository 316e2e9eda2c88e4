"""The list of models: the served one, with OpenAI's and Anthropic's fields."""

from datetime import UTC, datetime

from frontend.api.response_types import Model, ModelList
from frontend.errors import NotFound
from shared.messages import Limits


def model_of(name: str, created: int, limits: Limits | None) -> Model:
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
    )


def model_list(name: str, created: int, limits: Limits | None) -> ModelList:
    return ModelList(data=[model_of(name, created, limits)], first_id=name, last_id=name)


def find_model(wanted: str, name: str, created: int, limits: Limits | None) -> Model:
    """Returns the served model. Raises NotFound for any other name."""
    if wanted != name:
        raise NotFound(f"the model `{wanted}` is not served here", param="model", code="model_not_found")
    return model_of(name, created, limits)
