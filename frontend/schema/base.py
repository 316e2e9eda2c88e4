"""The base of request and response types, how JSON is encoded, and the refusals that name a field.

Knows no API format and no field.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

import msgspec
from msgspec import inspect as nodes

from frontend.errors import BadRequest, SluiceError, Unprocessable

# Structs whose fields are all keyword-only, so that a type may add required fields to its base's optional ones.


class KeywordStructMeta(msgspec.StructMeta):
    """Passes `kw_only=True` for a type and all its subclasses, because msgspec does not inherit this option.

    The names in a type's own IGNORED and REFUSED become fields of a base, so that msgspec reads them in the same pass.
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        rows = {**dict.fromkeys(namespace.get("IGNORED", ()), Ignored), **dict.fromkeys(namespace.get("REFUSED", ()))}
        if rows:
            body = {"__module__": namespace["__module__"], "__annotations__": rows, **dict.fromkeys(rows)}
            bases = (super().__new__(mcls, name, bases, body, kw_only=True),)
        return super().__new__(mcls, name, bases, namespace, kw_only=True, **options)


Names = tuple[str, ...]
Ignored = Annotated[Any, msgspec.Meta(description="Accepted, no effect")]


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

    IGNORED: the names of fields that have no effect.
    REFUSED: the names of fields of unsupported features, which may only be null (refusal_reasons.py says why).
    ONLY: fields of unsupported features, each with the values that leave the feature off.
    UNKNOWN_TYPE: the error code for an object whose `type` (or other tag) is unknown.
    DEFAULT_TYPE: whether an object without a tag has this type.
    KNOWN_BY: the name of a field; an object that has this field and no tag has this type.
    FROM_TEXT: a field; a string in place of the object stands for an object with only this field.
    SCHEMA: JSON Schemas that an object must also satisfy, for rules that involve several fields.
    """

    IGNORED: ClassVar[Names] = ()
    REFUSED: ClassVar[Names] = ()
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


# Encodes JSON for responses.
#
# The event loop serves all streams, so nothing long is encoded in one piece: a JsonArray encodes what it gets a few
# entries at a time, and `in_slices` gives other tasks their turn.

FEW_ENTRIES = 4096  # encoding so many log-probabilities takes a few milliseconds
SLICE_S = 0.005  # how long one task may keep the others of the event loop waiting
T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Encodes a value as JSON in one line.

    Python's `str.splitlines`, by which httpx splits streams, takes three non-ASCII characters for line ends. They can
    occur only in strings, so they are written as escapes.
    """
    data = _encode(value)
    if data.isascii():
        return data
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)  # 50 ns without a match; a check by `in` takes five times as long
    return data


class JsonArray:
    """An array in JSON that grows. Encoded entries take a tenth of the memory of their objects."""

    def __init__(self, each: int = 256) -> None:
        """each: how many entries are encoded together"""
        self._each = each
        self._done: list[bytes] = []
        self._pending: list[Any] = []

    def append(self, value: Any) -> None:
        self._pending.append(value)
        if len(self._pending) >= self._each:
            self._flush()

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def _flush(self) -> None:
        if self._pending:
            self._done.append(to_json(self._pending)[1:-1])
            self._pending.clear()

    @property
    def raw(self) -> msgspec.Raw:
        """The array so far."""
        self._flush()
        return msgspec.Raw(b"[%b]" % b",".join(self._done))


async def made(make: Callable[[], T], entries: int) -> T:
    """Returns make(): computed here if it encodes few entries, else in a thread, which gives way every 5 ms."""
    return make() if entries <= FEW_ENTRIES else await asyncio.to_thread(make)


async def in_slices(values: Iterable[T], use: Callable[[T], None]) -> None:
    """Calls `use` with each value. After SLICE_S, other tasks of the event loop get a turn."""
    until = time.perf_counter() + SLICE_S
    for value in values:
        use(value)
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S


_encode = msgspec.json.Encoder().encode
_LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029")


@dataclass_transform(kw_only_default=True)  # tells type checkers about KeywordStructMeta
class ResponseModel(msgspec.Struct, metaclass=KeywordStructMeta):
    """The base of all responses and of the objects in them."""
