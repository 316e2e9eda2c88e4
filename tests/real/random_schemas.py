"""Makes random JSON schemas as programs send them: with optional members, arrays, unions, references, formats."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "tags", "address", "is_active", "größe", "名前", "first name", "id", "created_at")
WORDS = ("red", "green", "blue", "ok", "n/a", 'say "hi"', "ü", "日本", "", 1, 2.5, None, True)
PATTERNS = (
    r"^[A-Z]{2}-[0-9]{3}$",
    r"^(cat|dog|bird)s?$",
    r"^[a-z]+@[a-z]+\.(com|org)$",
    r"^#[0-9a-f]{6}$",
    r"^\S{1,8}$",
)
FORMATS = ("date", "date-time", "time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration")
DEFINITIONS: dict[str, Schema] = {
    "colour": {"enum": ["red", "green", "blue"]},
    "point": {
        "type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"],
        "additionalProperties": False,
    },
    "list": {
        "type": "object", "required": ["value"], "additionalProperties": False,
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
        },
    },
}  # fmt: skip


def schema(draw: random.Random) -> Schema:
    """Returns a whole schema. Three quarters are objects, as most schemas of structured output and tools are."""
    inner = _object(draw, 0) if draw.random() < 0.75 else _any(draw, 0)
    return {**inner, "$defs": DEFINITIONS}


def parameters(draw: random.Random) -> Schema:
    """Returns a schema for a tool's arguments."""
    return {**_object(draw, 0), "$defs": DEFINITIONS}


def _any(draw: random.Random, depth: int) -> Schema:
    kinds = [_integer, _number, _string, _string, _choice, _flag, _reference]
    nested = [_object, _array, _union] if depth < 3 else []
    make = draw.choice(kinds + nested)
    return make(draw, depth + 1)


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    return {"type": "integer"} | draw.choice((
        {}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + draw.randint(0, 5000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(2, 9)}, {"minimum": 0, "multipleOf": 5},
    ))  # fmt: skip


def _number(draw: random.Random, depth: int) -> Schema:
    low = draw.choice((-1.5, 0, 0.25, 100))
    return {"type": "number"} | draw.choice(({}, {"minimum": low}, {"minimum": low, "maximum": low + 0.5}))


def _string(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 3)
    return {"type": "string"} | draw.choice((
        {}, {"minLength": least, "maxLength": least + draw.randint(0, 12)}, {"maxLength": 20},
        {"pattern": draw.choice(PATTERNS)}, {"format": draw.choice(FORMATS)}, {"pattern": draw.choice(PATTERNS)},
    ))  # fmt: skip


def _choice(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.2:
        return {"const": draw.choice((*WORDS, {"a": [1, "x"]}))}
    return {"enum": draw.sample(WORDS, draw.randint(1, 5))}


def _flag(draw: random.Random, depth: int) -> Schema:
    return draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"], "maxLength": 9}))


def _reference(draw: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{draw.choice(tuple(DEFINITIONS))}"}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    made = {name: _any(draw, depth + 1) for name in names}
    found: Schema = {"type": "object", "properties": made, "required": draw.sample(names, draw.randint(0, len(names)))}
    return found | draw.choice(({"additionalProperties": False}, {"additionalProperties": False}, {}))


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    found: Schema = {"type": "array", "items": _any(draw, depth + 1)}
    return found | draw.choice(({}, {"minItems": least, "maxItems": least + draw.randint(0, 2)}, {"maxItems": 3}))


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}
