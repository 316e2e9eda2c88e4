"""Finds schemas that allow no value, or only values that never end, before a grammar is made of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.structured_output.references import Path


@dataclass(slots=True)
class _Need:
    """Something without which the schema `of` (an id) allows no value."""

    of: int
    met: bool = False


class Productive:
    """Which parts of a schema allow a value. Takes time in proportion to the schema, whatever refers to what.

    definitions: the schemas by name, in their enforceable form
    paths, sources: of the parts of all schemas (see `json_schema.Reader`)
    """

    def __init__(
        self, definitions: Mapping[str, Any], paths: Mapping[int, Path], sources: Mapping[tuple[int, int], Path]
    ) -> None:
        self._definitions = definitions
        self._paths, self._sources = paths, sources
        self._unmet: dict[int, int] = {}  # by the id of a schema: how many of its needs are not known to be met
        self._helps = defaultdict[int, list[_Need]](list)  # by the id of a schema: the needs that it meets

    def possible(self, schema: Any) -> bool:
        """Whether a schema allows a value, as far as types, lists of values, and required parts show."""
        if isinstance(schema, bool):
            return schema
        if id(schema) not in self._unmet:
            self._read(schema)
        return not self._unmet[id(schema)]

    def _read(self, schema: dict[str, Any]) -> None:
        """Counts the needs of a schema and of all that it refers to, then strikes out those that are met."""
        waiting, possible = [schema], list[int]()
        while waiting:
            if id(one := waiting.pop()) in self._unmet:
                continue
            needs = [ways for _, ways in self._needs(one) if not any(map(self._is_known, ways))]
            for ways in needs:
                need = _Need(id(one))
                for way in ways:
                    if way is not False:
                        self._helps[id(way)].append(need)
                        waiting.append(way)
            self._unmet[id(one)] = len(needs)
            if not needs:
                possible.append(id(one))
        while possible:
            for need in self._helps[possible.pop()]:
                if not need.met:
                    need.met = True
                    self._unmet[need.of] -= 1
                    if not self._unmet[need.of]:
                        possible.append(need.of)

    def _is_known(self, schema: Any) -> bool:
        return schema is True or self._unmet.get(id(schema)) == 0

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
        """Returns a part of a schema that allows no value although it must, and its path; None if there is none."""
        for keys, ways in self._needs(schema):
            if not any(map(self.possible, ways)):
                return keys, ways[0] if len(ways) == 1 and keys[:1] not in (("anyOf",), ("required",)) else None
        return None

    def _needs(self, schema: dict[str, Any]) -> Iterator[tuple[Path, Sequence[Any]]]:
        """Yields what a schema needs to allow a value: the path within, and parts of which one must be possible."""
        if (reference := schema.get("$ref")) is not None:
            yield (), [self._definitions[reference.removeprefix("#/$defs/")]]
        for i, one in enumerate(schema.get("allOf", ())):
            yield ("allOf", i), [one]
        if (ways := schema.get("anyOf")) is not None:
            yield ("anyOf",), ways
        if schema.get("type") == "object":
            properties = schema.get("properties", {})
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            for name in schema.get("required", ()):
                yield (("properties", name), [properties[name]]) if name in properties else (("required",), [others])
        if schema.get("type") == "array":
            first = schema.get("prefixItems", ())
            for i in range(min(schema.get("minItems", 0), len(first) + 1)):
                yield (("prefixItems", i), [first[i]]) if i < len(first) else (("items",), [schema.get("items", True)])
