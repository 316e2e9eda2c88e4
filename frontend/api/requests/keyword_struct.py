"""Structs whose fields are all keyword-only, so that a type may add required fields to its base's optional ones."""

from typing import Any

import msgspec


class KeywordStructMeta(msgspec.StructMeta):
    """Passes `kw_only=True` for a type and all its subclasses, because msgspec does not inherit this option."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        return super().__new__(mcls, name, bases, namespace, kw_only=True, **options)
