"""Describes JSON Schemas in a few words: "integer, from 1 to 128", "array of (string), at most 16".

Knows only the keywords that occur in the schemas of requests. Any other keyword raises KeyError, so that no description
leaves something out.
"""

import json
from collections.abc import Iterator, Mapping

from frontend.api.requests.request_model import MOST, SMALLEST
from frontend.api.requests.request_schema import Schema

BOUNDLESS = 1e9  # a bound above this is not mentioned


def words(shape: Schema) -> str:
    """Describes the values that a schema allows, apart from null; an object is described only as "object"."""
    kinds = list(dict.fromkeys(_words(one) for one in _alternatives(shape)))
    return " or ".join(kinds) or "anything"


def _alternatives(schema: Schema) -> Iterator[Schema]:
    """Yields the alternatives of a schema, recursively. Only the first part of an `allOf` counts."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _alternatives(one)
    elif "allOf" in schema:
        yield from _alternatives(schema["allOf"][0])
    elif schema.get("type") != "null" and set(schema) - {"description"} != {"maxItems"}:
        yield schema


def _words(schema: Schema) -> str:
    if "enum" in schema:
        return " / ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = schema.get("type", "anything")
    return _of(kind, schema)


def _of(kind: str, schema: Schema) -> str:
    match kind:
        case "integer" | "number":
            return kind + _bounds(schema)
        case "array":
            most = schema.get("maxItems", MOST)
            return f"array of ({words(schema['items'])})" + (f", at most {most}" if most < 10_000 else "")
        case "object" if type(schema.get("additionalProperties")) is dict:
            return f"object of ({words(schema['additionalProperties'])})"
        case "string" if "maxLength" in schema:
            return f"string, at most {schema['maxLength']} characters"
        case _:
            return {"string": "string", "boolean": "boolean", "object": "object", "anything": "anything"}[kind]


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum", -MOST), schema.get("maximum", MOST)
    least = "above 0" if low == SMALLEST else f"from {low:g}" if abs(low) < BOUNDLESS else ""
    most = f"to {high:g}" if abs(high) < BOUNDLESS else ""
    return f", {least} {most}".rstrip() if least or most else ""


def inner(name: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yields every field of the objects in a schema: path (`messages[].role`), schema, and whether it is required."""
    for one in _alternatives(schema):
        if one.get("type") == "array":
            yield from inner(f"{name}[]", one["items"])
        for field, shape in one.get("properties", {}).items() if "additionalProperties" in one else ():
            yield f"{name}.{field}", shape, field in one.get("required", ())
            yield from inner(f"{name}.{field}", shape)


def merged(found: Iterator[tuple[str, Schema, bool]]) -> Mapping[str, tuple[str, bool]]:
    """Returns for each path the description over all alternatives, and whether the field is always required."""
    rows: dict[str, tuple[list[str], bool]] = {}
    for name, shape, required in found:
        known, always = rows.setdefault(name, ([], True))
        kind = words(shape)
        rows[name] = known + [kind] * (kind not in known), always and required
    return {name: (" / ".join(known), always) for name, (known, always) in rows.items()}


def default(shape: Schema) -> str:
    """Returns the default as JSON; empty if the schema states none. A schema states neither null nor a default that no
    client can send."""
    return f"`{json.dumps(shape['default'])}`" if "default" in shape else ""
