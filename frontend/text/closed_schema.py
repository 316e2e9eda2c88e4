"""JSON schemas whose objects may have no properties but those they name.

By a schema's own rules an object may have any others unless `additionalProperties` forbids them; few who leave it out
mean that, and a model may go on inventing for ever. What the closed schema allows, the given one allows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MANY = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")  # name → schema
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ONE = ("items", "additionalProperties", "contains", "then", "else")  # not what is denied, or a condition
OWN = {"properties", "required", "patternProperties", "additionalProperties"}  # what a schema says of an object itself
ELSEWHERE = {"anyOf", "oneOf", "allOf", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef", "not"}
OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself where one object is described in several places at once, of which each is a part only.

    Raises RecursionError.
    """
    return schema if any(map(_combines, _walk(schema))) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    inner = {key: _inside(key, value) for key, value in schema.items()}
    return inner | {"additionalProperties": False} if _may_close(schema) else inner


def _inside(key: str, value: Any) -> Any:
    if key in MANY and isinstance(value, dict):
        return {name: _closed(one) for name, one in value.items()}
    if key in SEVERAL and isinstance(value, list):
        return [_closed(one) for one in value]
    return _closed(value) if key in ONE else value


def _may_close(schema: Mapping[str, Any]) -> bool:
    """Not where it needs a property that it does not name."""
    named, least, required = schema.get("properties"), schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not isinstance(least, int):
        return False
    return OPEN.isdisjoint(schema) and least <= len(named) and all(name in named for name in required)


def _combines(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) > 1 if OWN.isdisjoint(schema) else not ELSEWHERE.isdisjoint(schema)


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """It and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in MANY and isinstance(value, dict):
            inner = list(value.values())
        elif key in SEVERAL and isinstance(value, list):
            inner = value
        else:
            inner = [value] if key in ONE else []
        for one in inner:
            yield from _walk(one)
