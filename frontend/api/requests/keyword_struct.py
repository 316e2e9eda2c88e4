"""Structs whose fields are all keyword-only, so that a type may add required fields to its base's optional ones."""

from typing import Any

import msgspec


class KeywordStructMeta(msgspec.StructMeta):
    """Adds `kw_only=True` to a type and to all types that derive from it, which msgspec's option does not."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        return super().__new__(mcls, name, bases, namespace, kw_only=True, **options)
