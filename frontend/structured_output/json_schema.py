"""Reads a JSON schema once, and says of each keyword whether a grammar enforces it, it means nothing here, or it cannot
be enforced, and why. The result is a schema of the keywords that llguidance enforces (Draft 2020-12).

A keyword that cannot be enforced is refused, or dropped and reported if the reader is lenient. Some can be enforced
only by allowing less than the schema does (`contains`: the array begins with the item): then a strict reader narrows
the schema, and a lenient one drops the keyword, because without `strict` a model may write any valid value.

The work grows with the size of the schema: each subschema is read once, and each target of a reference once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from frontend.errors import Unprocessable
from frontend.structured_output import numbers
from frontend.structured_output.keywords import (
    ALL,
    APPLIES,
    ARRAYS,
    FORMAT_PATTERNS,
    FORMATS,
    NUMBERS,
    OBJECTS,
    TYPES,
    Path,
    References,
    may_close,
    stays_open,
    types_of,
)
from frontend.structured_output.logic import Logic
from frontend.structured_output.patterns import Unsupported, translated
from frontend.structured_output.productive_rules import Productive

MAX_DEPTH = 100  # how deeply a schema may be nested
MAX_COUNT = 1 << 31  # a larger count is beyond any answer
MAX_CONTAINS = 64
MAX_BRANCHES = 8  # how many alternatives of `oneOf` may overlap, and how many dependencies one object may have

Schema = Any  # an object or a boolean


class Inexact(Exception):
    """The grammar of a subschema would not allow exactly what the subschema allows."""


@dataclass(frozen=True, slots=True)
class Supported:
    """A schema of enforceable keywords.

    dropped: the paths of the keywords that were dropped, with the reasons
    paths: id of an object within `schema` → the path of its source
    """

    schema: dict[str, Any]
    dropped: Mapping[str, str]
    paths: Mapping[int, Path]


@dataclass(slots=True)
class Node:
    """A subschema that is being read.

    resource: the identifier of the resource to which it belongs; types: the types that its values may have
    out: what is made of it; others: schemas that the same value must match, with the paths of their sources
    excluded: types that no value can have; why: the path and the reason of the last of them
    """

    schema: dict[str, Any]
    path: Path
    resource: str
    depth: int
    types: frozenset[str]
    out: dict[str, Any] = field(default_factory=dict)
    others: list[tuple[Path, Schema]] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    why: tuple[Path, str] = ((), "")

    def exclude(self, types: frozenset[str], path: Path, reason: str) -> None:
        self.excluded |= types
        self.why = path, reason


def supported(root: Schema, param: str, *, lenient: bool, at: Path = ()) -> Supported:
    """Reads a schema. param: its name in the request; at: the path of the subschema to read; empty: the whole schema

    Raises Unprocessable, whose `param` is the path of what is refused.
    """
    reader = Reader(root, param, lenient)
    schema = reader.whole(at)
    return Supported(schema, reader.dropped, reader.paths)


def shown_path(param: str, path: Path) -> str:
    """Returns a path in a schema as errors and the response header write it: `tools[0].parameters.properties.x`."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" if _is_plain(key) else f'["{key}"]' for key in path]
    return param + "".join(parts)


def refused(path: str, reason: str) -> Unprocessable:
    return Unprocessable(f"`{path}` cannot be enforced: {reason}", param=path, code="invalid_grammar")


class Reader:
    """Reads one schema."""

    def __init__(self, root: Schema, param: str, lenient: bool) -> None:
        self.root, self.param, self.lenient = root, param, lenient
        self.dropped: dict[str, str] = {}
        self.references = References(root)
        self.closing = not stays_open(root)
        self.exactly = False  # whether anything inexact raises Inexact
        self.paths: dict[int, Path] = {}  # id of each object made → the path of its source
        self.sources: dict[tuple[int, int], Path] = {}  # (id of an object made, index in its allOf) → the path
        self.impossible: dict[Path, tuple[Path, str]] = {}  # path that allows nothing → the keyword's path, the reason
        self._names: dict[tuple[int, bool, bool], str] = {}
        self._waiting: list[tuple[str, Schema, Path, str, bool]] = []
        self._made: dict[str, Schema] = {}
        self._logic = Logic(self)

    def whole(self, at: Path) -> dict[str, Any]:
        """Returns the schema at a path, with the definitions that it needs. Raises Unprocessable."""
        schema, resource = self.root, self.references.whole
        for key in at:
            schema = schema[key]
        made = self.node(schema, at, resource, 0)
        self._define()
        if not (productive := Productive(self._made, self.paths, self.sources)).possible(made):
            culprit = productive.culprit(made, at)
            path, reason = self.impossible.get(culprit, (culprit, "no value can match it, or none that ends"))
            raise refused(shown_path(self.param, path), reason)
        made = {} if made is True else made
        whole = {**made, "$defs": self._made} if self._made else made
        self.paths[id(whole)] = at
        return whole

    def _define(self) -> None:
        while self._waiting:
            name, schema, path, resource, self.closing = self._waiting.pop()
            self._made[name] = self.node(schema, path, resource, 0)

    # what cannot be enforced

    def cannot(self, path: Path, reason: str) -> None:
        """Refuses or drops what is at this path."""
        if self.exactly:
            raise Inexact
        shown = shown_path(self.param, path)
        if not self.lenient:
            raise refused(shown, reason)
        self.dropped.setdefault(shown, reason)

    def may_narrow(self, path: Path, reason: str) -> bool:
        """Whether a keyword is enforced by allowing less than the schema does. If not, the keyword is dropped."""
        if self.exactly:
            raise Inexact
        if self.lenient:
            self.dropped.setdefault(shown_path(self.param, path), reason)
        return not self.lenient

    def exact(self, schema: Schema, path: Path, resource: str, depth: int) -> Schema | None:
        """Returns a schema that allows exactly what `schema` allows, whose objects are not closed; None if there is
        no such schema."""
        before = self.exactly, self.closing, self._waiting
        self.exactly, self.closing, self._waiting = True, False, before[2] if self.exactly else []
        known = len(self._names)
        try:
            made = self.node(schema, path, resource, depth)
            if not before[0]:
                self._define()
            return made
        except Inexact:
            if before[0]:
                raise
            while len(self._names) > known:  # a later attempt reads these definitions again
                self._made.pop(self._names.popitem()[1], None)
            return None
        finally:
            self.exactly, self.closing, self._waiting = before

    def opened(self, schema: Schema, path: Path, resource: str, depth: int) -> Schema:
        """Reads a schema without closing its objects."""
        before, self.closing = self.closing, False
        try:
            return self.node(schema, path, resource, depth)
        finally:
            self.closing = before

    # nodes

    def node(self, schema: Schema, path: Path, resource: str, depth: int, types: frozenset[str] = ALL) -> Schema:
        """Returns the enforceable form of a subschema. types: the types that values may have here"""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.cannot(path, "a schema is an object or a boolean")
            return True
        if depth > MAX_DEPTH:
            raise refused(shown_path(self.param, path)[:200], f"it is nested more than {MAX_DEPTH} deep")
        if "$id" in schema or "id" in schema:
            resource = self.references.base(schema, resource)
        node = Node(schema, path, resource, depth, types)
        if self.references.old and isinstance(schema.get("$ref"), str):
            self._ref(node, schema["$ref"], (*path, "$ref"))
        else:
            self._type(node)
            for key, value in schema.items():
                handle = HANDLERS.get(key)
                if handle is not None and not (key in APPLIES and APPLIES[key].isdisjoint(node.types)):
                    handle(self, node, value, (*path, key))
        return self._finished(node)

    def child(self, node: Node, schema: Schema, *keys: Any) -> Schema:
        return self.node(schema, (*node.path, *keys), node.resource, node.depth + 1)

    def _finished(self, node: Node) -> Schema:
        out = node.out
        if node.excluded:
            left = node.types - node.excluded
            if not left:
                self.impossible[node.path] = node.why
                return False
            out["type"] = [one for one in TYPES if one in left and not (one == "integer" and "number" in left)]
        if node.others:
            kind = {"type": out["type"]} if "type" in out else {}
            parts = out["allOf"] = out.get("allOf", [])
            for path, one in node.others:
                self.sources[id(out), len(parts)] = path
                parts.append(kind | one if isinstance(one, dict) and "type" not in one else one)
        if "properties" in out and "additionalProperties" not in out and self.closing and may_close(node.schema):
            out["additionalProperties"] = False
        if not out:
            return True
        self.paths[id(out)] = node.path
        return out

    def _type(self, node: Node) -> None:
        value = node.schema.get("type")
        if value is None:
            return
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not named or not all(isinstance(one, str) and one in ALL for one in named):
            self.cannot((*node.path, "type"), f"{value!r:.80} is no type")
            return
        node.out["type"] = named[0] if len(named) == 1 else list(dict.fromkeys(named))
        node.types = frozenset(named) | ({"integer"} if "number" in named else frozenset())

    # values and combinations

    def _values(self, node: Node, value: Any, path: Path) -> None:
        values = [value] if path[-1] == "const" else value
        if not isinstance(values, list):
            return self.cannot(path, "it is not a list")
        fitting = [one for one in values if not node.types.isdisjoint(types_of(one))]
        if not all(map(_is_exact, fitting)):
            return self.cannot(path, "a number of more than 64 bits, or between two doubles, cannot be written exactly")
        if fitting:
            node.out["enum"] = (
                fitting if "enum" not in node.out else [one for one in fitting if one in node.out["enum"]]
            )
        else:
            node.exclude(node.types, path, "it lists no value of the types that are allowed there")
        return None

    def _all_of(self, node: Node, value: Any, path: Path) -> None:
        if self._is_list(value, path):
            parts = [
                self.node(one, (*path, i), node.resource, node.depth + 1, node.types) for i, one in enumerate(value)
            ]
            node.out["allOf"] = parts

    def _any_of(self, node: Node, value: Any, path: Path) -> None:
        if self._is_list(value, path):
            parts = [
                self.node(one, (*path, i), node.resource, node.depth + 1, node.types) for i, one in enumerate(value)
            ]
            node.out["anyOf"] = parts

    def _one_of(self, node: Node, value: Any, path: Path) -> None:
        if not self._is_list(value, path):
            return
        made, reason = self._logic.exactly_one(node, value, path)
        if reason:
            self.cannot(path, reason)
        node.others.append((path, made))

    def _not(self, node: Node, value: Any, path: Path) -> None:
        made, complete = self._logic.opposite(value, path, node.resource, node.depth + 1, node.types)
        self._narrowed(node, made, complete, path, "a schema of this kind cannot be negated")

    def _if(self, node: Node, value: Any, path: Path) -> None:
        branches = [key for key in ("then", "else") if key in node.schema]
        if not branches:
            return
        then, other = (node.schema.get(key, True) for key in ("then", "else"))
        base, (resource, depth) = node.path, (node.resource, node.depth + 1)
        negated, complete = self._logic.opposite(value, path, resource, depth, node.types)
        made = [self.opened(one, (*base, key), resource, depth) for key, one in (("then", then), ("else", other))]
        condition = True if "then" not in node.schema else self.exact(value, path, resource, depth)
        both = [] if complete else [_both(*made)]
        ways = [*([] if condition is None else [_both(condition, made[0])]), _both(negated, made[1]), *both]
        if "then" not in node.schema:  # the condition or the rest holds
            plain = self.exact(value, path, resource, depth)
            ways, complete = ([plain, made[1]], True) if plain is not None else ([made[1]], False)
        self._narrowed(
            node, {"anyOf": ways}, complete and condition is not None, path, "its opposite cannot be enforced"
        )

    def _narrowed(self, node: Node, made: Schema, complete: bool, path: Path, reason: str) -> None:
        """Adds the schema that a keyword means. complete: whether it allows all that the keyword does (`may_narrow`)"""
        if made is False and not complete:
            self.cannot(path, reason)
        elif complete or self.may_narrow(path, reason):
            node.others.append((path, made))

    def _ref(self, node: Node, value: Any, path: Path) -> None:
        found = self.references.find(value, node.resource) if isinstance(value, str) else None
        if found is None:
            return self.cannot(path, f"{value!r:.200} is not within the schema")
        dynamic = path[-1] in ("$dynamicRef", "$recursiveRef")
        if dynamic and self.references.dynamic(str(value).rpartition("#")[2]) > 1:
            return self.cannot(path, "several schemas have this dynamic anchor")
        made = self.reference(*found)
        if "$ref" in node.out or not isinstance(made, dict):
            node.others.append((path, made))
        else:
            node.out |= made
        return None

    def reference(self, path: Path, schema: Schema, resource: str) -> Schema:
        """Returns a reference to a subschema, which is read later, once."""
        if isinstance(schema, bool):
            return schema
        key = (id(schema), self.closing, self.exactly)
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._waiting.append((self._names[key], schema, path, resource, self.closing))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # numbers, strings

    def _bounds(self, node: Node, value: Any, path: Path) -> None:
        if path[-1] != next(key for key in node.schema if key in numbers.WORDS):
            return  # the first of these keywords reads all of them
        stated = {key: one for key, one in node.schema.items() if key in numbers.WORDS}
        while True:
            try:
                found = numbers.bounds(stated, "number" not in node.types)
            except numbers.Invalid as invalid:
                lacking = {invalid.args[0]: invalid.args[1]}
            else:
                lacking = dict(found.beyond)
                lacking |= {
                    key: reason
                    for key, reason in found.narrowed.items()
                    if not self.may_narrow((*node.path, key), reason)
                }
                if not lacking:
                    break
            for key, reason in lacking.items():
                self.cannot((*node.path, key), reason)
                del stated[key]
        node.out |= found.words
        if found.empty:
            node.exclude(NUMBERS, path, found.empty)

    def _count(self, node: Node, value: Any, path: Path) -> int | None:
        """Returns a keyword that counts as an integer; None if it is none, or beyond any answer."""
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0
        if not whole:
            self.cannot(path, f"{value!r:.80} is not a count")
            return None
        return int(min(value, MAX_COUNT))

    def _size(self, node: Node, value: Any, path: Path) -> None:
        """Reads minLength, maxLength, minItems and maxItems."""
        if (count := self._count(node, value, path)) is None:
            return
        word = str(path[-1])
        if count == MAX_COUNT:
            if word.startswith("min"):
                node.exclude(APPLIES[word], path, "no answer is this long")
        elif count or word.startswith("max"):
            node.out[word] = count
        least, most = node.out.get(f"min{word[3:]}", 0), node.out.get(f"max{word[3:]}", MAX_COUNT)
        if least > most:
            node.exclude(APPLIES[word], path, f"at least {least} and at most {most} are required")

    def _pattern(self, node: Node, value: Any, path: Path) -> None:
        if (made := self._translated(value, path)) is not None:
            node.out["pattern"] = made[0]
            node.others += [(path, {"pattern": one}) for one in made[1:]]

    def _translated(self, value: Any, path: Path) -> tuple[str, ...] | None:
        try:
            if not isinstance(value, str):
                raise Unsupported("it is not a text")
            return translated(value)
        except Unsupported as error:
            self.cannot(path, str(error))
            return None

    def _format(self, node: Node, value: Any, path: Path) -> None:
        if not isinstance(value, str):
            self.cannot(path, "it is not a text")
        elif value in FORMAT_PATTERNS and "pattern" not in node.schema:
            node.out["pattern"] = FORMAT_PATTERNS[value]
        elif value in FORMAT_PATTERNS:
            node.others.append((path, {"pattern": FORMAT_PATTERNS[value]}))
        elif value in FORMATS:
            node.out["format"] = value

    # arrays

    def _items(self, node: Node, value: Any, path: Path) -> None:
        if path[-1] == "additionalItems" and not isinstance(node.schema.get("items"), list):
            return
        listed = isinstance(value, list)
        if path[-1] == "prefixItems" and isinstance(node.schema.get("items"), list):
            return
        if path[-1] == "prefixItems" and not listed:
            return self.cannot(path, "it is not a list")
        if listed:
            node.out["prefixItems"] = [self.child(node, one, path[-1], i) for i, one in enumerate(value)]
        else:
            node.out["items"] = self.child(node, value, path[-1])
        return None

    def _unique_items(self, node: Node, value: Any, path: Path) -> None:
        most = node.schema.get("maxItems")
        if value is False or (value is True and isinstance(most, int | float) and most <= 1):
            return
        self.cannot(path, "a grammar cannot compare items" if value is True else "it is not a boolean")

    def _contains(self, node: Node, value: Any, path: Path) -> None:
        least, most = node.schema.get("minContains", 1), node.schema.get("maxContains")
        least = self._count(node, least, (*node.path, "minContains"))
        most = None if most is None else self._count(node, most, (*node.path, "maxContains"))
        least = 1 if least is None else least
        if not least and most is None:
            return
        if value is True or value == {}:
            node.others.append((path, {"minItems": least} | ({} if most is None else {"maxItems": most})))
        elif least > MAX_CONTAINS:
            self.cannot(path, f"an array cannot be required to contain more than {MAX_CONTAINS} items of one kind")
        elif most is not None and least > most:
            node.exclude(ARRAYS, path, "minContains is above maxContains")
        elif self.may_narrow(path, "a grammar cannot search an array"):  # the matching items stand at the beginning
            made: dict[str, Any] = {"prefixItems": [self.child(node, value, "contains")] * least, "minItems": least}
            if most is not None:
                made["items"], _ = self._logic.opposite(value, path, node.resource, node.depth + 1, ALL)
            node.others.append((path, made))

    def _unevaluated_items(self, node: Node, value: Any, path: Path) -> None:
        if value is True or value == {}:
            return
        count, complete = self._logic.evaluated_items(node)
        if count is None:
            return
        rest = self.child(node, value, "unevaluatedItems")
        made = {"prefixItems": [True] * count, "items": rest} if count else {"items": rest}
        self._narrowed(node, made, complete, path, "what its alternatives evaluate is not known beforehand")

    # objects

    def _properties(self, node: Node, value: Any, path: Path) -> None:
        if self._is_object(value, path):
            node.out["properties"] = {name: self.child(node, one, "properties", name) for name, one in value.items()}

    def _pattern_properties(self, node: Node, value: Any, path: Path) -> None:
        if not self._is_object(value, path):
            return
        made: dict[str, Schema] = {}
        for pattern, one in value.items():
            found = self._translated(pattern, (*path, pattern))
            if found is not None and found[1:]:
                self.cannot((*path, pattern), "look-ahead is not supported for names")
            elif found is not None:
                made[found[0]] = self.child(node, one, "patternProperties", pattern)
        if len(made) == len(value):
            node.out["patternProperties"] = made
        elif "additionalProperties" in node.schema:
            self.cannot((*node.path, "additionalProperties"), "a pattern beside it cannot be enforced")

    def _additional_properties(self, node: Node, value: Any, path: Path) -> None:
        patterns = node.schema.get("patternProperties")
        if not isinstance(patterns, dict) or all(_may_translate(one) for one in patterns):
            node.out["additionalProperties"] = self.child(node, value, "additionalProperties")

    def _required(self, node: Node, value: Any, path: Path) -> None:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            node.out["required"] = list(dict.fromkeys(value))
        else:
            self.cannot(path, "it is not a list of names")

    def _property_count(self, node: Node, value: Any, path: Path) -> None:
        if (count := self._count(node, value, path)) is None:
            return
        schema = node.schema
        properties, required = schema.get("properties"), schema.get("required")
        named = set(properties) if isinstance(properties, dict) else set()
        needed = {one for one in required if isinstance(one, str)} if isinstance(required, list) else set()
        is_open = bool(schema.get("patternProperties")) or not (
            schema.get("additionalProperties") is False
            or ("additionalProperties" not in schema and self.closing and may_close(schema))
        )
        more, word = count - len(needed), str(path[-1])
        if word == "minProperties" and (more <= 0 or (is_open and more == 1 and named <= needed)):
            node.out |= {"minProperties": count} if more > 0 else {}
        elif word == "maxProperties" and more < 0:
            node.exclude(OBJECTS, path, "more properties are required")
        elif word == "maxProperties" and not is_open and count >= len(named | needed):
            return
        elif (not is_open and more == 1) or (word == "maxProperties" and named <= needed):
            node.out[word] = count
        else:
            self.cannot(path, "properties that may be left out, or be repeated, cannot be counted")

    def _property_names(self, node: Node, value: Any, path: Path) -> None:
        made, reason = self._logic.names(value, path, node.resource)
        if reason:
            self.cannot(path, reason)
        elif made is not True:
            node.others.append((path, made))

    def _dependent(self, node: Node, value: Any, path: Path) -> None:
        """Reads dependentRequired, dependentSchemas and `dependencies`."""
        if not self._is_object(value, path):
            return
        if len(value) > MAX_BRANCHES:
            return self.cannot(path, f"an object cannot have more than {MAX_BRANCHES} dependencies")
        for name, one in value.items():
            if isinstance(one, list) and path[-1] != "dependentSchemas":
                then: Schema = {
                    "required": [name, *(other for other in one if isinstance(other, str) and other != name)]
                }
            else:
                then = _both({"required": [name]}, self.opened(one, (*path, name), node.resource, node.depth + 1))
            if isinstance(one, list) and not one:
                continue
            node.others.append((path, {"anyOf": [{"properties": {name: False}}, then]}))
        return None

    def _unevaluated_properties(self, node: Node, value: Any, path: Path) -> None:
        if value is True or value == {}:
            return
        made, complete = self._logic.unevaluated_properties(node, self.child(node, value, "unevaluatedProperties"))
        if made is not True:
            self._narrowed(node, made, complete, path, "what its alternatives evaluate is not known beforehand")

    # checks

    def _is_list(self, value: Any, path: Path) -> bool:
        if not isinstance(value, list) or not value:
            self.cannot(path, "it is not a list of schemas")
            return False
        return True

    def _is_object(self, value: Any, path: Path) -> bool:
        if not isinstance(value, dict):
            self.cannot(path, "it is not an object")
            return False
        return True


def _both(one: Schema, other: Schema) -> Schema:
    """Returns a schema of values that match two schemas."""
    if one is True or other is False:
        return other
    return one if other is True or one is False else {"allOf": [one, other]}


def _is_exact(value: Any) -> bool:
    if isinstance(value, list | dict):
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return all(map(_is_exact, inner))
    return isinstance(value, bool) or not isinstance(value, int | float) or numbers.exact(value)


def _may_translate(pattern: str) -> bool:
    try:
        return len(translated(pattern)) == 1
    except Unsupported:
        return False


def _is_plain(key: Any) -> bool:
    return isinstance(key, str) and key.replace("$", "").replace("-", "").replace("_", "").isalnum()


Handler = Callable[[Reader, Node, Any, Path], None]
# keyword → the function that reads it. A keyword that is not here means nothing for what is valid.
HANDLERS: dict[str, Handler] = {
    "enum": Reader._values, "const": Reader._values, "allOf": Reader._all_of, "anyOf": Reader._any_of,
    "oneOf": Reader._one_of, "not": Reader._not, "if": Reader._if,
    "$ref": Reader._ref, "$dynamicRef": Reader._ref, "$recursiveRef": Reader._ref,
    **dict.fromkeys(numbers.WORDS, Reader._bounds),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Reader._size),
    "pattern": Reader._pattern, "format": Reader._format,
    "items": Reader._items, "prefixItems": Reader._items, "additionalItems": Reader._items,
    "uniqueItems": Reader._unique_items, "contains": Reader._contains, "unevaluatedItems": Reader._unevaluated_items,
    "properties": Reader._properties, "patternProperties": Reader._pattern_properties,
    "additionalProperties": Reader._additional_properties, "required": Reader._required,
    "minProperties": Reader._property_count, "maxProperties": Reader._property_count,
    "propertyNames": Reader._property_names, "unevaluatedProperties": Reader._unevaluated_properties,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), Reader._dependent),
}  # fmt: skip
