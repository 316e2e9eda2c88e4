"""Finds out from a JSON schema which kinds of values a parameter may have.

Where a format writes a string without quotes, only the schema tells a text from a number."""

import json
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

MAX_DEPTH = 16  # the depth to which references and alternatives are followed


class Kind(Enum):
    """How the text of a value is to be understood."""

    TEXT = auto()  # the text is the string itself
    JSON = auto()  # the text is JSON of a type other than string
    EITHER = auto()  # like JSON if the text is JSON of such a type, else like TEXT


def kinds_of(schema: Mapping[str, Any]) -> dict[str, Kind]:
    """Returns the kind of each named parameter of a function; other parameters are TEXT."""
    properties = schema.get("properties")
    return {name: kind_of(one, schema) for name, one in properties.items()} if isinstance(properties, dict) else {}


def kind_of(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Returns the kind of a value. A schema that says nothing of the type means a string."""
    types = types_of(schema, root)
    if not types or types == {"string"}:
        return Kind.TEXT
    return Kind.EITHER if "string" in types else Kind.JSON


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the JSON types that a value may have, as far as the schema says."""
    return frozenset(_types(schema, root, MAX_DEPTH))


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema that a reference within `root` leads to; an empty schema if the reference leads nowhere."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _at(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _at(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root if reference.startswith("#") else None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (one for one in named if isinstance(one, str))
    elif isinstance(schema.get("enum"), list):
        yield from map(_type_of, schema["enum"])
    elif "const" in schema:
        yield _type_of(schema["const"])
    elif "properties" in schema:
        yield "object"
    elif "items" in schema:
        yield "array"
    elif depth:
        for key in ("anyOf", "oneOf", "allOf"):
            alternatives = schema.get(key)
            for one in alternatives if isinstance(alternatives, list) else ():
                yield from _types(one, root, depth - 1)


def _type_of(value: Any) -> str:
    return {str: "string", bool: "boolean", type(None): "null"}.get(type(value), "other")


def as_json(text: str, kind: Kind) -> str:
    """Returns the JSON of a value, from its whole text. Text of the kind JSON that is no JSON becomes a string."""
    if kind is not Kind.TEXT:
        stripped = text.strip()
        try:
            value = json.loads(PYTHON_WORDS.get(stripped, stripped), parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = text
        if not isinstance(value, str):
            return PYTHON_WORDS.get(stripped, stripped)
        text = value if kind is Kind.JSON else text
    return json.dumps(text, ensure_ascii=False)


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _refuse(word: str) -> Any:
    raise ValueError(word)
