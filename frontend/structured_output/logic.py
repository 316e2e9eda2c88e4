"""The logic of schemas that a grammar lacks: opposites, exclusive alternatives, and what is left unevaluated."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from frontend.structured_output.keywords import (
    ALL,
    APPLIES,
    NUMBERS,
    OBJECTS,
    STRINGS,
    TYPES,
    Path,
    equal,
    may_close,
    types_of,
)
from frontend.structured_output.patterns import ANYTHING, Unsupported, translated, words_unlike

if TYPE_CHECKING:
    from frontend.structured_output.json_schema import Node, Reader, Schema

MAX_LEVELS = 8  # how deeply opposites, comparisons and names are followed
MAX_BRANCHES = 8
# keyword → its opposite, and the difference of their values
OPPOSITES = {
    "minLength": ("maxLength", -1), "maxLength": ("minLength", 1), "minItems": ("maxItems", -1),
    "maxItems": ("minItems", 1), "minProperties": ("maxProperties", -1), "maxProperties": ("minProperties", 1),
    "minimum": ("exclusiveMaximum", 0), "exclusiveMinimum": ("maximum", 0), "maximum": ("exclusiveMinimum", 0),
    "exclusiveMaximum": ("minimum", 0),
}  # fmt: skip
OTHER_ASSERTIONS = {
    "oneOf", "if", "contains", "pattern", "format", "multipleOf", "additionalProperties", "patternProperties",
    "propertyNames", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    "unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip


@dataclass(slots=True)
class _Evaluated:
    """The properties that a schema evaluates, whatever the value; and its lists of alternatives."""

    names: dict[str, "Schema"] = field(default_factory=dict)
    patterns: dict[str, "Schema"] = field(default_factory=dict)
    everything: bool = False
    alternatives: list[tuple[Path, list[Any], str]] = field(default_factory=list)
    unknown: bool = False  # whether other properties may be evaluated, depending on the value


class Logic:
    def __init__(self, reader: "Reader") -> None:
        self._reader = reader

    def opposite(
        self, schema: "Schema", path: Path, resource: str, depth: int, types: frozenset[str]
    ) -> tuple["Schema", bool]:
        """Returns a schema of values that do not match `schema`, and whether it allows all of these.

        types: the types that values may have
        """
        raw, complete = self._opposite(schema, resource, types, 0)
        ways, found = raw["anyOf"] if isinstance(raw, dict) else [raw], []
        for one in ways:
            made = self._reader.exact(one, path, resource, depth)
            complete &= made is not None
            found += [] if made is None or made is False else [made]
        return ({"anyOf": found} if found else False), complete

    def _opposite(self, schema: "Schema", resource: str, types: frozenset[str], level: int) -> tuple["Schema", bool]:
        """Returns the opposite as a schema that is still to be read: a boolean, or `{"anyOf": [...]}`."""
        if isinstance(schema, bool):
            return not schema, True
        if not isinstance(schema, dict) or level > MAX_LEVELS:
            return False, False
        ways: list[Schema] = []
        complete = True
        named = schema.get("type")
        inner = types
        if named is not None:
            listed = _texts(named if isinstance(named, list) else [named])
            listed |= {"integer"} if "number" in listed else frozenset()
            complete = not ("integer" in listed and "number" in types - listed)
            rest = types - listed - ({"number"} if "integer" in listed else frozenset())
            ways += [{"type": _listed(rest)}] if rest else []
            inner = types & listed
        for key, value in schema.items():
            more, whole = self._without(key, value, schema, resource, inner, level)
            ways += more
            complete &= whole
        return ({"anyOf": ways} if ways else False), complete

    def _without(
        self, key: str, value: Any, schema: dict[str, Any], resource: str, types: frozenset[str], level: int
    ) -> tuple[list["Schema"], bool]:
        """Returns schemas of values that do not keep to one keyword, and whether they are all of these values."""
        applies = APPLIES.get(key, ALL) & types
        if not applies:
            return [], True
        kind = {"type": _listed(applies)}
        match key, value:
            case "enum", list():
                return _other_values(value, types)
            case "const", _:
                return _other_values([value], types)
            case (("allOf" | "anyOf"), list()):
                parts = [self._opposite(one, resource, types, level + 1) for one in value]
                whole = all(complete for _, complete in parts)
                ways = [made for made, _ in parts if made is not False]
                if key == "anyOf":
                    ways = [{"allOf": ways}] if len(ways) == len(parts) else []
                return ways, whole
            case "not", _:
                return [{"allOf": [kind, value]}], True
            case "$ref", str():
                found = self._reader.references.find(value, resource)
                if found is None or found[2] != resource:
                    return [], False
                made, whole = self._opposite(found[1], resource, types, level + 1)
                return ([] if made is False else [made]), whole
            case "required", list():
                return [{**kind, "properties": {name: False}} for name in value if isinstance(name, str)], True
            case "properties", dict():
                made_of = {name: self._opposite(one, resource, ALL, level + 1) for name, one in value.items()}
                ways = [
                    {**kind, "required": [name], "properties": {name: made}}
                    for name, (made, _) in made_of.items()
                    if made is not False
                ]
                return ways, all(whole for _, whole in made_of.values())
            case "prefixItems", list():
                found_of = [self._opposite(one, resource, ALL, level + 1) for one in value]
                ways = [
                    {**kind, "minItems": i + 1, "prefixItems": [True] * i + [made]}
                    for i, (made, _) in enumerate(found_of)
                    if made is not False
                ]
                return ways, all(whole for _, whole in found_of)
            case "items", False:
                first = schema.get("prefixItems")
                return [{**kind, "minItems": 1 + len(first) if isinstance(first, list) else 1}], True
            case _ if key in OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
                word, more = OPPOSITES[key]
                return ([{**kind, word: value + more}] if value + more >= 0 or applies <= NUMBERS else []), True
        return [], not (key in OTHER_ASSERTIONS or key in APPLIES) or value is True

    # alternatives

    def exactly_one(self, node: "Node", value: list[Any], path: Path) -> tuple["Schema", str]:
        """Returns a schema of values that match exactly one of several schemas, and why it cannot be enforced."""
        reader = self._reader
        made = [reader.node(one, (*path, i), node.resource, node.depth + 1, node.types) for i, one in enumerate(value)]
        overlaps = [
            [
                j
                for j in range(len(value))
                if j != i and not self._disjoint(value[i], value[j], node.resource, node.types)
            ]
            for i in range(len(value))
        ]
        if not any(overlaps):
            return {"anyOf": made}, ""
        if sum(map(bool, overlaps)) > MAX_BRANCHES:
            return {"anyOf": made}, "too many of its alternatives may hold at once"
        ways, complete = [], True
        for i, one in enumerate(made):
            parts = [one]
            for j in overlaps[i]:
                other, whole = self.opposite(value[j], (*path, j), node.resource, node.depth + 1, node.types)
                parts.append(other)
                complete &= whole
            if False not in parts:
                ways.append({"allOf": parts} if parts[1:] else one)
        if complete or (ways and not (reader.lenient or reader.exactly)):
            return ({"anyOf": ways} if ways else False), ""
        return {"anyOf": made}, "several of its alternatives may hold at once, and a grammar cannot exclude that"

    def _disjoint(self, one: Any, other: Any, resource: str, types: frozenset[str], level: int = 0) -> bool:
        """Whether no value matches both schemas, with the first one closed as it is when it is read."""
        if one is False or other is False:
            return True
        one, other = self._resolved(one, resource), self._resolved(other, resource)
        if not isinstance(one, dict) or not isinstance(other, dict) or level > MAX_LEVELS:
            return False
        mine, theirs = _values(one), _values(other)
        if mine is not None and theirs is not None and not any(equal(a, b) for a in mine for b in theirs):
            return True
        kinds = _types(one, mine, types), _types(other, theirs, types)
        if not kinds[0] & kinds[1]:
            return True
        if kinds[0] & kinds[1] != OBJECTS:
            return False
        parts: list[dict[str, Any]] = [
            each["properties"] if isinstance(each.get("properties"), dict) else {} for each in (one, other)
        ]
        needed = [sorted(_texts(each.get("required"))) for each in (one, other)]
        shut = one.get("additionalProperties") is False or (self._reader.closing and may_close(one))
        if shut and "patternProperties" not in one and any(name not in parts[0] for name in needed[1]):
            return True
        return any(
            self._disjoint(parts[0][name], parts[1][name], resource, ALL, level + 1)
            for name in dict.fromkeys([*needed[0], *needed[1]])
            if name in parts[0] and name in parts[1]
        )

    def _resolved(self, schema: Any, resource: str) -> Any:
        for _ in range(MAX_LEVELS):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            found = self._reader.references.find(schema["$ref"], resource)
            if found is None or found[2] != resource:
                break
            schema = found[1]
        return schema

    # what is left unevaluated

    def unevaluated_properties(self, node: "Node", rest: "Schema") -> tuple["Schema", bool]:
        """Returns a schema of objects whose unevaluated properties match `rest`, and whether it allows all of these."""
        base = _Evaluated()
        self._collect(node.schema, node.path, node.resource, base, 0, own=True)
        if base.everything:
            return True, True
        if len(base.alternatives) != 1 or len(base.alternatives[0][1]) > MAX_BRANCHES:
            return _closure(base, rest), not (base.alternatives or base.unknown)
        ((path, branches, resource),) = base.alternatives
        ways = []
        for i, branch in enumerate(branches):
            inner = _Evaluated(dict(base.names), dict(base.patterns))
            self._collect(branch, (*path, i), resource, inner, 0)
            made = self._reader.opened(branch, (*path, i), resource, node.depth + 1)
            ways.append(made if inner.everything else {"allOf": [made, _closure(inner, rest)]})
        return {"anyOf": ways}, not (base.unknown or self._reader.exactly)

    def _collect(
        self, schema: Any, path: Path, resource: str, found: _Evaluated, level: int, *, own: bool = False
    ) -> None:
        if not isinstance(schema, dict):
            return
        found.unknown |= level > MAX_LEVELS or not {"if", "dependentSchemas", "dependencies"}.isdisjoint(schema)
        if level > MAX_LEVELS:
            return
        for key, value in schema.items():
            match key, value:
                case "properties", dict():
                    found.names |= dict.fromkeys(value, True)
                case "patternProperties", dict():
                    found.patterns |= dict.fromkeys(value, True)
                case "additionalProperties", _:
                    found.everything = True
                case "unevaluatedProperties", _ if not own:
                    found.everything = True
                case "allOf", list():
                    for i, one in enumerate(value):
                        self._collect(one, (*path, key, i), resource, found, level + 1)
                case (("anyOf" | "oneOf"), list()):
                    found.alternatives.append(((*path, key), value, resource))
                case "$ref", str():
                    target = self._reader.references.find(value, resource)
                    if target is not None:
                        self._collect(target[1], target[0], target[2], found, level + 1)
                case "$dynamicRef", _:
                    found.unknown = True

    def evaluated_items(self, node: "Node") -> tuple[int | None, bool]:
        """Returns how many first items of an array a schema evaluates, and whether no others may be evaluated.

        The count is None if all items are evaluated.
        """
        return self._count_items(node.schema, node.resource, 0)

    def _count_items(self, schema: Any, resource: str, level: int) -> tuple[int | None, bool]:
        if not isinstance(schema, dict) or level > MAX_LEVELS:
            return 0, not level
        items, first = schema.get("items"), schema.get("prefixItems")
        if (items is not None and not isinstance(items, list)) or "additionalItems" in schema:
            return None, True
        if level and "unevaluatedItems" in schema:
            return None, True
        listed = items if isinstance(items, list) else first if isinstance(first, list) else []
        count, complete = len(listed), {"anyOf", "oneOf", "if", "contains", "$dynamicRef"}.isdisjoint(schema)
        parts = [(one, resource) for one in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
        if isinstance(schema.get("$ref"), str):
            target = self._reader.references.find(schema["$ref"], resource)
            parts += [] if target is None else [(target[1], target[2])]
        for one, inside in parts:
            more, whole = self._count_items(one, inside, level + 1)
            if more is None:
                return None, True
            count, complete = max(count, more), complete and whole
        return count, complete

    # names

    def names(self, schema: Any, path: Path, resource: str) -> tuple["Schema", str]:
        """Returns a schema of objects whose names match a schema, and why there is none."""
        schema = self._resolved(schema, resource)
        if isinstance(schema, bool):
            return schema or _only({}), ""
        if not isinstance(schema, dict):
            return True, "a schema is an object or a boolean"
        values = _values(schema)
        if "string" not in _types(schema, None, ALL):
            return _only({}), ""
        words = {key for key in schema if key in APPLIES and APPLIES[key] == STRINGS}
        others = ({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"}) & schema.keys()
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        counts = all(type(one) is int and 0 <= one < 1 << 16 for one in (least, most) if one is not None)
        if others or not counts or len(words - {"minLength", "maxLength"}) > 1 or "format" in words:
            return True, "only a list, a pattern or a length of names can be enforced"
        if values is not None and "pattern" not in words:
            fitting = [
                one
                for one in values
                if isinstance(one, str) and least <= len(one) <= (len(one) if most is None else most)
            ]
            return _only(dict.fromkeys(fitting, True)), ""
        if not words:
            return True, ""
        try:
            patterns = translated(schema["pattern"]) if "pattern" in words else ()
        except (Unsupported, TypeError) as error:
            return True, f"its pattern: {error}"
        if not patterns:
            patterns = (f"^{ANYTHING}{{{least},{'' if most is None else most}}}$",)
        elif values is not None or words != {"pattern"} or patterns[1:]:
            return True, "a pattern of names cannot be enforced with other keywords"
        return {"patternProperties": {patterns[0]: True}, "additionalProperties": False}, ""


def _only(names: dict[str, Any]) -> "Schema":
    return {"properties": names, "additionalProperties": False}


def _closure(found: _Evaluated, rest: "Schema") -> "Schema":
    made: dict[str, Any] = {"properties": found.names, "additionalProperties": rest}
    try:
        patterns = [translated(one) for one in found.patterns]
    except Unsupported:
        return False
    if any(one[1:] for one in patterns):
        return False
    return made | ({"patternProperties": {one[0]: True for one in patterns}} if patterns else {})


def _listed(types: frozenset[str]) -> list[str]:
    return [one for one in TYPES if one in types and not (one == "integer" and "number" in types)]


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _types(schema: dict[str, Any], values: list[Any] | None, types: frozenset[str]) -> frozenset[str]:
    """Returns the types that values of a schema may have, as far as it says. types: those that values may have there"""
    if values is not None:
        return types & frozenset().union(*map(types_of, values))
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else None
    if listed is None:
        return types
    return types & (_texts(listed) | ({"integer"} if "number" in listed else set()))


def _texts(value: Any) -> frozenset[str]:
    """Returns the texts of a list; none if it is no list. Schemas are read here before they are checked."""
    return frozenset([one for one in value if isinstance(one, str)]) if isinstance(value, list) else frozenset()


def _other_values(values: list[Any], types: frozenset[str]) -> tuple[list["Schema"], bool]:
    """Returns schemas of values of some types that are not listed, and whether they are all of these values."""
    found: list[Schema] = []
    complete = not any(isinstance(one, list | dict) for one in values)
    held = frozenset().union(*map(types_of, values))
    rest = types - held - (NUMBERS if held & NUMBERS else frozenset())
    found += [{"type": _listed(rest)}] if rest else []
    if held & types & {"boolean"}:
        found += [{"enum": [one]} for one in (True, False) if not any(one is other for other in values)]
    if held & types & STRINGS:
        try:
            found.append({"type": "string", "pattern": words_unlike([one for one in values if isinstance(one, str)])})
        except Unsupported:
            complete = False
    if held & types & NUMBERS:
        kind = _listed(types & NUMBERS)
        ends = sorted({one for one in values if isinstance(one, int | float) and not isinstance(one, bool)})
        for low, high in zip([None, *ends], [*ends, None], strict=True):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append({"type": kind, **{key: end for key, end in bounds.items() if end is not None}})
    return found, complete
