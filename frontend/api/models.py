"""The list of models: the one that is served, with the fields of OpenAI's and of Anthropic's.

`max_model_len` is an extension, and null until a worker has reported it.
"""

from datetime import UTC, datetime
from typing import Any

from frontend.errors import NotFound
from shared.messages import Limits


def model(name: str, created: int, limits: Limits | None) -> dict[str, Any]:
    most = limits.max_seq_len if limits else None
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sluice",
        "max_model_len": most,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "max_input_tokens": most,
    }


def listing(name: str, created: int, limits: Limits | None) -> dict[str, Any]:
    data = [model(name, created, limits)]
    return {"object": "list", "data": data, "has_more": False, "first_id": name, "last_id": name}


def one(wanted: str, name: str, created: int, limits: Limits | None) -> dict[str, Any]:
    """Raises NotFound for any name but the served one."""
    if wanted != name:
        raise NotFound(f"the model `{wanted}` is not served here", param="model", code="model_not_found")
    return model(name, created, limits)
