"""The keywords of JSON Schema: to which types each applies, which hold subschemas, and which formats are enforced.

Also finds what the references of a schema lead to.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

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


# Finds what the references of a JSON schema lead to: JSON pointers, anchors and identifiers within the schema.

Path = tuple[Any, ...]  # keys and indices from the root to a subschema
MORE_SINGLE = ("not", "if", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "propertyNames",
             "contentSchema", "dependencies", "$defs", "definitions")  # fmt: skip
LONGEST_POINTER = 64  # keys


class References:
    """The subschemas of one schema by their addresses."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # Old drafts ignore all keywords next to `$ref`.
        self.old = isinstance(root, dict) and any(one in str(root.get("$schema", "")) for one in OLD_DRAFTS)
        self.whole = self.base(root, "") if isinstance(root, dict) else ""  # the identifier of the whole schema

    def find(self, reference: str, base: str) -> tuple[Path, Any, str] | None:
        """Returns the path, the subschema and the resource that a reference leads to; None if it leads nowhere.

        base: the identifier of the resource in which the reference stands
        """
        if base == self.whole and reference in ("#", "#/"):
            return (), self._root, base
        if base == self.whole and reference.startswith("#/"):
            return _at((), self._root, base, reference[2:])
        url, fragment = urldefrag(urljoin(base, reference) if base else reference)
        if not fragment or fragment.startswith("/"):
            found = ((), self._root, url) if url == self.whole else self._index[0].get(url)
            return _at(*found, fragment[1:]) if found and fragment else found
        return self._index[1].get((url, unquote(fragment)))

    def base(self, schema: dict[str, Any], base: str) -> str:
        """Returns the identifier of the resource to which a schema belongs. base: the one of the schema around it"""
        own = schema.get("$id", schema.get("id"))
        if not isinstance(own, str) or own.startswith("#") or (self.old and "$ref" in schema):
            return base
        return urldefrag(urljoin(base, own))[0]

    def dynamic(self, name: str) -> int:
        """Returns how many dynamic anchors have this name."""
        return self._index[2].count(name)

    @cached_property
    def _index(
        self,
    ) -> tuple[dict[str, tuple[Path, Any, str]], dict[tuple[str, str], tuple[Path, Any, str]], list[str]]:
        resources: dict[str, tuple[Path, Any, str]] = {}
        anchors: dict[tuple[str, str], tuple[Path, Any, str]] = {}
        dynamic = []
        for path, schema, base in _subschemas((), self._root, "", self):
            own = schema.get("$id", schema.get("id"))
            if isinstance(own, str) and not own.startswith("#") and not (self.old and "$ref" in schema):
                resources.setdefault(base, (path, schema, base))
            elif isinstance(own, str):  # as in draft 6 and 7
                anchors.setdefault((base, own[1:]), (path, schema, base))
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(key), str):
                    anchors.setdefault((base, name), (path, schema, base))
                    dynamic += [name] * (key == "$dynamicAnchor")
        return resources, anchors, dynamic


def _at(path: Path, found: Any, resource: str, pointer: str) -> tuple[Path, Any, str] | None:
    keys = pointer.split("/")
    for part in keys if len(keys) <= LONGEST_POINTER else [""]:
        key: Any = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            key = int(key)
        elif not isinstance(found, dict) or key not in found:
            return None
        path, found = (*path, key), found[key]
    return path, found, resource


def _subschemas(
    path: Path, schema: Any, base: str, references: References
) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """Yields the path, the schema and its resource, for a schema and all its subschemas."""
    waiting = [(path, schema, base)]
    while waiting:
        path, schema, base = waiting.pop()
        if not isinstance(schema, dict):
            continue
        base = references.base(schema, base)
        yield path, schema, base
        for key, value in schema.items():
            if isinstance(value, dict) and (key in BY_NAME or key == "dependencies"):
                waiting += [((*path, key, name), one, base) for name, one in value.items()]
            elif isinstance(value, list) and key in LISTS:
                waiting += [((*path, key, i), one, base) for i, one in enumerate(value)]
            elif isinstance(value, dict) and (key in SINGLE or key in MORE_SINGLE):
                waiting.append(((*path, key), value, base))
