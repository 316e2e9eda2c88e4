"""The keywords of JSON Schema: to which types each applies, and the formats that a grammar enforces."""

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
OLD_DRAFTS = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")  # beside `$ref`, they ignore all other keywords


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
