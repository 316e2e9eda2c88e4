"""The base of all request types, helpers for msgspec's description of a type, and the refusals that name a field.

Knows no API format and no field.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, dataclass_transform

import msgspec
from msgspec import inspect as nodes

from frontend.api.requests.keyword_struct import KeywordStructMeta
from frontend.errors import BadRequest, SluiceError, Unprocessable

MOST = (1 << 31) - 1  # the upper bound of most integer fields, so that no tensor and no counter overflows
LARGEST, SMALLEST = 3.4e38, 2.0**-126  # bounds of numbers, because the worker computes in float32
TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
EXACT = msgspec.Meta(extra={"exact": True})  # an integer that may not be written as 8.0


@dataclass_transform(kw_only_default=True, frozen_default=True)  # tells type checkers about KeywordStructMeta
class RequestModel(
    msgspec.Struct, metaclass=KeywordStructMeta, forbid_unknown_fields=True, frozen=True, omit_defaults=True
):
    """The base of all types that a request is decoded into.

    ONLY: fields of unsupported features, each with the values that leave the feature off.
    UNKNOWN_TYPE: the error code for an object whose `type` (or other tag) is unknown.
    DEFAULT_TYPE: whether an object without a tag has this type.
    KNOWN_BY: the name of a field; an object that has this field and no tag has this type.
    FROM_TEXT: a field; a string in place of the object stands for an object with only this field.
    SCHEMA: JSON Schemas that an object must also satisfy, for rules that involve several fields.
    """

    ONLY: ClassVar[Mapping[str, Sequence[Any]]] = {}
    UNKNOWN_TYPE: ClassVar[str] = "out_of_range"
    DEFAULT_TYPE: ClassVar[bool] = False
    KNOWN_BY: ClassVar[str] = ""
    FROM_TEXT: ClassVar[str] = ""
    SCHEMA: ClassVar[Sequence[Mapping[str, Any]]] = ()


class FieldError(ValueError):
    """Raised in `__post_init__` of a RequestModel for a field whose value is malformed or contradicts another field."""

    def __init__(self, field: str, problem: str, error: type[SluiceError] = Unprocessable, code: str = "out_of_range"):
        super().__init__(f"`{field}` {problem}")
        self.field, self.problem, self.error, self.code = field, problem, error, code

    def at(self, path: str) -> SluiceError:
        return self.error(f"`{path}{self.field}` {self.problem}", param=path + self.field, code=self.code)


def wrong_type(path: str, value: Any, expected: str) -> BadRequest:
    found = TYPE_NAMES.get(type(value), "something else")
    return BadRequest(f"`{path}` must be {expected}, not {found}", param=path, code="wrong_type")


def out_of_range(path: str, value: Any, expected: str) -> Unprocessable:
    return Unprocessable(f"`{path}` must be {expected}, got {value!r:.80}", param=path, code="out_of_range")


@cache
def type_info(kind: type[RequestModel]) -> nodes.StructType:
    node = nodes.type_info(kind)
    assert isinstance(node, nodes.StructType)
    return node


@cache
def fields_of(kind: type[RequestModel]) -> Mapping[str, nodes.Field]:
    """Returns the fields of a type by their names in JSON."""
    return {field.encode_name: field for field in type_info(kind).fields}


def bare(node: nodes.Type) -> nodes.Type:
    """Returns the type without msgspec's Metadata around it."""
    while isinstance(node, nodes.Metadata):
        node = node.type
    return node


def alternatives(node: nodes.Type) -> Iterator[nodes.Type]:
    """Yields the members of a union, without null; for any other type, the type itself."""
    union = bare(node)
    for one in union.types if isinstance(union, nodes.UnionType) else (node,):
        if isinstance(bare(one), nodes.UnionType):
            yield from alternatives(one)
        elif not isinstance(bare(one), nodes.NoneType):
            yield one
