"""Narrows the OpenAPI document for fuzzing: requests ask for short answers, and answers have no undocumented fields.

The module knows which fields cost time or need values that fit this server; it contacts no server.
"""

import copy
from collections.abc import Mapping
from typing import Any

MAXIMUMS = {"n": 2, "best_of": 2, "max_completion_tokens": 6, "min_tokens": 4, "n_cmpl": 1}
ID = {"type": "integer", "minimum": 0, "maximum": 50}
TEXTS = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": ID, "minItems": 1}]}


def narrowed(document: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Limits requests to `model` and few tokens, and answers to the documented fields."""
    narrow = copy.deepcopy(dict(document))
    schemas = narrow["components"]["schemas"]
    for name, shape in schemas.items():
        if name.endswith("Request"):
            _shorten(name, shape, model)
        else:
            close(shape)
    for path, item in narrow["paths"].items():
        if "parameters" in item and path.startswith("/v1/models"):
            item["parameters"][0]["schema"] = {"enum": [model, "other", f"{model}/{model}", "\U0001f642"]}
    return narrow


def _shorten(name: str, request: dict[str, Any], model: str) -> None:
    fields = request["properties"]
    fields["model"] = {"enum": [model]}
    for field, maximum in MAXIMUMS.items():
        if field in fields:
            _inner(fields[field])["maximum"] = maximum
    for field in ("stop_token_ids", "tokens"):
        if field in fields:
            _inner(fields[field])["items"] = ID
    for field in [field for field in fields if field.startswith("guided_")]:
        del fields[field]  # `structured_outputs` has this field, too, and a request may set only one of the two
    if "structured_outputs" in fields:
        _inner(fields["structured_outputs"])["maxProperties"] = 1
    if name == "TokenizeRequest":  # tokenize only a text, because other routes cover chats
        request["required"] = ["prompt"]
        for field in ("messages", "continue_final_message"):
            del fields[field]
    for field in ("n_predict", "response_fields"):  # n_predict overrides `max_tokens`, response_fields hides the end
        fields.pop(field, None)
    if name == "LlamaCppCompletionRequest":  # one answer, so that a stream has one end
        fields["prompt"] = TEXTS
    if name == "CompletionRequest":
        fields["prompt"] = {"anyOf": [TEXTS, {"type": "array", "items": TEXTS, "minItems": 1, "maxItems": 3}]}
    if "logit_bias" in fields:
        _inner(fields["logit_bias"])["propertyNames"] = {"pattern": "^[1-9]{1,3}$"}
    for field in ("max_tokens", "max_output_tokens"):
        if field in fields:
            fields[field] = {"type": "integer", "minimum": 1, "maximum": 6}
            request["required"] = sorted({*request["required"], field})


def _inner(field: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a nullable field without the alternative null."""
    return field["anyOf"][0] if "anyOf" in field else field  # type: ignore[no-any-return]


def close(shape: Any) -> None:
    """Changes a schema, so that objects may have only the named properties."""
    match shape:
        case dict():
            if "properties" in shape:
                shape.setdefault("additionalProperties", False)
            for inner in shape.values():
                close(inner)
        case list():
            for inner in shape:
                close(inner)
