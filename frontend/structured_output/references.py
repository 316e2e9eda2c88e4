"""Finds what the references of a JSON schema lead to: JSON pointers, anchors and identifiers within the schema."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from frontend.structured_output.keywords import BY_NAME, LISTS, OLD_DRAFTS, SINGLE

Path = tuple[Any, ...]  # keys and indices from the root to a subschema
ELSEWHERE = ("not", "if", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "propertyNames",
             "contentSchema", "dependencies", "$defs", "definitions")  # fmt: skip
LONGEST = 64  # how many keys a pointer may have


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
        for path, schema, base in _walk((), self._root, "", self):
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
    for part in keys if len(keys) <= LONGEST else [""]:
        key: Any = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            key = int(key)
        elif not isinstance(found, dict) or key not in found:
            return None
        path, found = (*path, key), found[key]
    return path, found, resource


def _walk(path: Path, schema: Any, base: str, references: References) -> Iterator[tuple[Path, dict[str, Any], str]]:
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
            elif isinstance(value, dict) and (key in SINGLE or key in ELSEWHERE):
                waiting.append(((*path, key), value, base))
