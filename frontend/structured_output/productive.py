"""Finds schemas that allow no value, or only values that never end, before a grammar is made of them."""

from collections.abc import Mapping
from typing import Any

from frontend.structured_output.references import Path


class Productive:
    """Which definitions of a schema allow a value.

    definitions: the schemas by name, in their enforceable form
    paths, sources: of the parts of all schemas (see `json_schema.Reader`)
    """

    def __init__(
        self, definitions: Mapping[str, Any], paths: Mapping[int, Path], sources: Mapping[tuple[int, int], Path]
    ) -> None:
        self._definitions = definitions
        self._paths, self._sources = paths, sources
        self._known: set[str] = set()  # the references to definitions that allow a value
        while more := {
            name for name, one in definitions.items() if _to(name) not in self._known and self.possible(one)
        }:
            self._known.update(map(_to, more))

    def possible(self, schema: Any) -> bool:
        """Whether a schema allows a value, as far as types, lists of values, and required parts show."""
        if isinstance(schema, bool):
            return schema
        return self._culprit(schema) is None

    def culprit(self, schema: Any, path: Path) -> Path:
        """Returns the path of the part for which a schema allows no value. path: of the schema itself"""
        seen = set()
        while isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            path = self._paths.get(id(schema), path)
            keys, inner = self._culprit(schema) or ((), None)
            source = self._sources.get((id(schema), keys[1])) if keys[:1] == ("allOf",) else None
            path = (*path, *keys) if source is None else source
            schema = inner if source is None or id(inner) in self._paths else None
        return path

    def _culprit(self, schema: dict[str, Any]) -> tuple[Path, Any] | None:
        """Returns the part of a schema that allows no value though it must, and its path within; None if each may."""
        reference = schema.get("$ref")
        if reference is not None and reference not in self._known:
            return (), self._definitions[reference.removeprefix(_to(""))]
        for i, one in enumerate(schema.get("allOf", ())):
            if not self.possible(one):
                return ("allOf", i), one
        ways = schema.get("anyOf")
        if ways is not None and not any(map(self.possible, ways)):
            return ("anyOf",), None
        if schema.get("type") == "object":
            properties = schema.get("properties", {})
            for name in schema.get("required", ()):
                one = properties.get(
                    name, True if "patternProperties" in schema else schema.get("additionalProperties")
                )
                if one is not None and not self.possible(one):
                    return (("properties", name), one) if name in properties else (("required",), None)
        if schema.get("type") == "array":
            first = schema.get("prefixItems", ())
            for i in range(min(schema.get("minItems", 0), len(first) + 1)):
                one = first[i] if i < len(first) else schema.get("items", True)
                if not self.possible(one):
                    return ("prefixItems", i) if i < len(first) else ("items",), one
        return None


def _to(name: str) -> str:
    return f"#/$defs/{name}"
