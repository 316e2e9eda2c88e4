"""OpenAI's list of models: the one that is served, with `max_model_len` added, null until a worker has told it."""

from typing import Any

from frontend.errors import NotFound


def model(name: str, created: int, max_seq_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sluice",
        "max_model_len": max_seq_len,
    }


def listing(name: str, created: int, max_seq_len: int | None) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, created, max_seq_len)]}


def one(wanted: str, name: str, created: int, max_seq_len: int | None) -> dict[str, Any]:
    """Raises NotFound for any name but the served one."""
    if wanted != name:
        raise NotFound(f"the model `{wanted}` is not served here", param="model", code="model_not_found")
    return model(name, created, max_seq_len)
