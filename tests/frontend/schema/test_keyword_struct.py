"""Structs whose fields are keyword-only in all types that derive from them."""

import msgspec
import pytest

from frontend.schema.base import KeywordStructMeta


class Base(msgspec.Struct, metaclass=KeywordStructMeta):
    optional: int = 1


class Derived(Base):
    required: str


def test_keyword_struct_adds_required_fields_after_optional_ones() -> None:
    value = Derived(required="x")
    assert (value.optional, value.required) == (1, "x")
    assert msgspec.json.decode(b'{"required": "y", "optional": 2}', type=Derived) == Derived(required="y", optional=2)


def test_keyword_struct_refuses_positional_arguments() -> None:
    with pytest.raises(TypeError):
        Base(2)
    with pytest.raises(TypeError):
        Derived("x")
