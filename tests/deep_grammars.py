"""Schemas and grammars with long chains of references, for every kind of reference."""

from collections.abc import Callable
from typing import Any

# functions from a number to a definition's name, further members and reference; and the name of the referring property
Chain = tuple[Callable[[int], str], Callable[[int], dict[str, Any]], Callable[[int], str], str]

CHAINS: Chain = (lambda i: f"d{i}", lambda i: {}, lambda i: f"#/$defs/d{i}", "a")
ANCHORS: Chain = (lambda i: f"d{i}", lambda i: {"$anchor": f"a{i}"}, lambda i: f"#a{i}", "a")
IDS: Chain = (lambda i: f"d{i}", lambda i: {"$id": f"http://x/{i}"}, lambda i: f"http://x/{i}", "a")
PERCENT: Chain = (lambda i: f"d {i}", lambda i: {}, lambda i: f"#/$defs/d%20{i}", "a")
NAMED_DEFINITIONS: Chain = (lambda i: f"d{i}", lambda i: {}, lambda i: f"#/$defs/d{i}", "definitions")


def chain(kind: Chain, length: int) -> dict[str, Any]:
    """Returns a schema in which each definition refers to the next."""
    name, more, reference, key = kind
    definitions: dict[str, Any] = {
        name(i): {**more(i), "type": "object", "properties": {key: {"$ref": reference(i + 1)}}} for i in range(length)
    }
    definitions[name(length)] = {**more(length), "type": "null"}
    return {"$ref": reference(0), "$defs": definitions}


def rules(name: str, length: int, attributes: str = "") -> str:
    """Returns a Lark grammar in which each rule refers to the next.

    If `name` is in capitals, the grammar has terminals instead of rules.
    """
    lines = [f'{name}{i}{attributes}: "a" {name}{i + 1}' for i in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "b"'])
