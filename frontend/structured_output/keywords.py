"""The keywords of JSON Schema: to which types each applies, which hold subschemas, and which formats are enforced."""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ALL = frozenset(TYPES)
NUMBERS, STRINGS = frozenset({"integer", "number"}), frozenset({"string"})
ARRAYS, OBJECTS = frozenset({"array"}), frozenset({"object"})

# keyword → the types to which it applies; it means nothing for values of other types
APPLIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), STRINGS),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
         "unevaluatedItems"), ARRAYS,
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
         "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"), OBJECTS,
    ),
}  # fmt: skip
# The formats that a grammar enforces: with llguidance's own expressions, and with these, whose dates exist (29 February
# in leap years only) and are understood by every library. JSON Schema takes any other format for an annotation.
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
OLD_DRAFTS = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")  # next to `$ref`, they ignore all other keywords


def types_of(value: Any) -> frozenset[str]:
    """Returns the types of a JSON value."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return NUMBERS
        case float():
            return NUMBERS if value.is_integer() else frozenset({"number"})
        case str():
            return STRINGS
        case list():
            return ARRAYS
    return OBJECTS


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal. `True` is not 1, as it is in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


# Which objects of a schema are closed: they may only have the properties that the schema names.
#
# JSON Schema allows unnamed properties unless `additionalProperties` forbids them. Most clients that omit this keyword
# do not want unnamed properties, and a model could invent more of them forever. A closed schema only allows values that
# the original schema allows, too.

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
