"""Finds the part of a schema at which a compiler takes offence, by giving it the parts one by one."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

from frontend.errors import Unprocessable
from frontend.structured_output.json_schema import HANDLERS, supported
from frontend.structured_output.keywords import BY_NAME, LISTS
from frontend.structured_output.references import Path, References

MAX_TRIALS = 200  # of one search
DEFINITIONS = ("$defs", "definitions")
INNER = ("items", "additionalProperties", "contains", "then", "else", "if", "not", "unevaluatedProperties",
         "unevaluatedItems", "additionalItems")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """path: of the subschema or, if `removable`, of its keyword without which the subschema would be accepted"""

    path: Path
    reason: str
    removable: bool


def at_fault(
    schema: dict[str, Any] | bool, param: str, error: Callable[[dict[str, Any]], str], *, lenient: bool
) -> Fault | None:
    """Returns the innermost part that is refused; None if each part alone is accepted.

    error: returns why a schema in its enforceable form is refused, or ""
    """
    trials = iter(range(MAX_TRIALS))

    def reason_of(whole: dict[str, Any] | bool, path: Path) -> str:
        if next(trials, None) is None:
            return ""
        try:
            return error(supported(whole, param, lenient=lenient, at=path).schema)
        except Unprocessable:  # a part that allows nothing may be optional
            return ""

    path: Path = ()
    reason = reason_of(schema, path)
    if not reason:
        return None
    seen = {path}
    references = References(schema)
    node: Any = schema
    going = True
    while going:
        going = False
        for inner, one in _parts(node, path, references):
            if inner not in seen and (found := reason_of(schema, inner)):
                seen.add(inner)
                path, node, reason, going = inner, one, found, True
                break
    if isinstance(node, dict) and not _allows_nothing(reason):
        for key in [key for key in reversed(node) if key in HANDLERS]:
            if not reason_of(without(schema, (*path, key)), path):
                return Fault((*path, key), reason, next(trials, None) is not None)
    return Fault(path, reason, False)


def without(schema: Any, path: Path) -> Any:
    """Returns a copy of a schema that lacks what is at a path."""
    changed = copy(schema)
    if path[1:]:
        changed[path[0]] = without(schema[path[0]], path[1:])
    else:
        del changed[path[0]]
    return changed


def _parts(node: Any, path: Path, references: References) -> Iterator[tuple[Path, Any]]:
    """Yields the subschemas that a schema uses, with their paths."""
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in BY_NAME and key not in DEFINITIONS and isinstance(value, dict):
            yield from (((*path, key, name), one) for name, one in value.items())
        elif key in LISTS and isinstance(value, list):
            yield from (((*path, key, i), one) for i, one in enumerate(value))
        elif key in INNER and isinstance(value, dict):
            yield (*path, key), value
        elif key == "$ref" and isinstance(value, str) and (found := references.find(value, references.whole)):
            yield found[0], found[1]


def _allows_nothing(reason: str) -> bool:
    return "Unsatisfiable" in reason
