"""Which objects of a JSON schema are closed: they may only have the properties that the schema names.

JSON Schema allows unnamed properties unless `additionalProperties` forbids them. Most clients that omit this keyword
do not want unnamed properties, and a model could invent more of them forever. A closed schema only allows values that
the original schema allows, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# keywords that map names to subschemas
BY_NAME = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
# keywords with a list of subschemas
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
# keywords with one subschema, except `not` and `if`: closing their subschemas could allow more values
SINGLE = ("items", "additionalProperties", "contains", "then", "else")
# keywords that describe the object itself
OWN = {"properties", "required", "patternProperties", "additionalProperties"}
# keywords with which a second subschema describes the same object
ELSEWHERE = {"anyOf", "oneOf", "allOf", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef", "not"}
# keywords that say which unnamed properties are allowed
OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"}


def stays_open(schema: Any) -> bool:
    """Whether objects of the schema are not closed, because several of its parts describe one object together."""
    return any(map(_combines, _walk(schema)))


def may_close(schema: Mapping[str, Any]) -> bool:
    """Whether the schema can be closed: an object with only the named properties can satisfy it."""
    named, at_least, required = schema.get("properties"), schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not isinstance(at_least, int):
        return False
    return OPEN.isdisjoint(schema) and at_least <= len(named) and all(name in named for name in required)


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether several subschemas apply to one object: closing one would forbid properties that another names."""
    parts = schema.get("allOf")
    return isinstance(parts, list) and len(parts) > 1 if OWN.isdisjoint(schema) else not ELSEWHERE.isdisjoint(schema)


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the schema and all its subschemas."""
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for key, value in schema.items():
            if key in BY_NAME and isinstance(value, dict):
                waiting += value.values()
            elif key in LISTS and isinstance(value, list):
                waiting += value
            elif key in SINGLE:
                waiting.append(value)
