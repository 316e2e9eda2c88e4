"""Decodes a request body into its type, or refuses it with an error that names the field.

A body that is written as its type says is decoded by msgspec in one pass. Every other body is read field by field in
Python, by the same type. That second reading accepts what msgspec does not: null for a field with a default, 8.0 for
an integer, an object without its optional type, and the harmless values of features that are not offered. It refuses
everything else: with BadRequest for a wrong JSON type, a missing field or an empty array, with Unprocessable for a
value out of range and an unknown or unsupported field.

Knows no API format and no field.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar, dataclass_transform

import msgspec
from msgspec import inspect as nodes

from frontend.errors import BadRequest, SluiceError, Unprocessable

MOST = (1 << 31) - 1  # the largest integer of most fields: no tensor and no counter wraps
LARGEST, SMALLEST = 3.4e38, 2.0**-126  # of a number: the range of float32, in which the worker computes
TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
NODE_KINDS: Mapping[type[nodes.Type], type] = {
    nodes.BoolType: bool,
    nodes.IntType: int,
    nodes.FloatType: float,
    nodes.StrType: str,
    nodes.LiteralType: str,
    nodes.ListType: list,
    nodes.DictType: dict,
    nodes.StructType: dict,
}
EXACT = msgspec.Meta(extra={"exact": True})  # an integer that may not be written as 8.0


class _RequestMeta(msgspec.StructMeta):
    """Makes all fields keyword-only, so that a type may add required fields to its base's optional ones."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        return super().__new__(mcls, name, bases, namespace, kw_only=True, **options)


@dataclass_transform(kw_only_default=True, frozen_default=True)  # for type checkers
class RequestModel(msgspec.Struct, metaclass=_RequestMeta, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """Base of all types that a request is decoded into.

    ONLY: fields of features that are not offered, each with the values that leave the feature off.
    UNKNOWN_TYPE: the code of the refusal of an object whose `type` (or other tag) is unknown.
    DEFAULT_TYPE: an object without a tag is taken for one of this type.
    SCHEMA: what JSON Schema must say about an object besides its fields.
    """

    ONLY: ClassVar[Mapping[str, Sequence[Any]]] = {}
    UNKNOWN_TYPE: ClassVar[str] = "out_of_range"
    DEFAULT_TYPE: ClassVar[bool] = False
    SCHEMA: ClassVar[Sequence[Mapping[str, Any]]] = ()


class FieldError(ValueError):
    """Raised in `__post_init__` of a RequestModel for a field whose value does not fit the others, or its syntax."""

    def __init__(self, field: str, problem: str, error: type[SluiceError] = Unprocessable, code: str = "out_of_range"):
        super().__init__(f"`{field}` {problem}")
        self.field, self.problem, self.error, self.code = field, problem, error, code

    def at(self, path: str) -> SluiceError:
        return self.error(f"`{path}{self.field}` {self.problem}", param=path + self.field, code=self.code)


Request = TypeVar("Request", bound=RequestModel)


def decode(body: bytes, kind: type[Request]) -> Request:
    """The body as `kind`. Raises BadRequest or Unprocessable."""
    try:
        request: Request = _decoder(kind).decode(body)
        return request
    except msgspec.ValidationError:
        return _read_body(decode_json(body), kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _not_json(exc) from None


def convert(body: Mapping[str, Any], kind: type[Request]) -> Request:
    """The same for a body that is already decoded, or was never JSON."""
    try:
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError:
        return _read_body(body, kind)


def decode_json(body: bytes) -> Any:
    """Plain values. Raises BadRequest."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _not_json(exc) from None


def wrong_type(path: str, value: Any, expected: str) -> BadRequest:
    found = TYPE_NAMES.get(type(value), "something else")
    return BadRequest(f"`{path}` must be {expected}, not {found}", param=path, code="wrong_type")


def out_of_range(path: str, value: Any, expected: str) -> Unprocessable:
    return Unprocessable(f"`{path}` must be {expected}, got {value!r:.80}", param=path, code="out_of_range")


def empty(path: str) -> BadRequest:
    return BadRequest(f"`{path}` is empty", param=path, code="empty_prompt")


@cache
def type_info(kind: type[RequestModel]) -> nodes.StructType:
    node = nodes.type_info(kind)
    assert isinstance(node, nodes.StructType)
    return node


@cache
def fields_of(kind: type[RequestModel]) -> Mapping[str, nodes.Field]:
    """By name in JSON."""
    return {field.encode_name: field for field in type_info(kind).fields}


def bare(node: nodes.Type) -> nodes.Type:
    """Without its metadata."""
    while isinstance(node, nodes.Metadata):
        node = node.type
    return node


def alternatives(node: nodes.Type) -> Iterator[nodes.Type]:
    """What a value may be, null aside."""
    union = bare(node)
    for one in union.types if isinstance(union, nodes.UnionType) else (node,):
        if isinstance(bare(one), nodes.UnionType):
            yield from alternatives(one)
        elif not isinstance(bare(one), nodes.NoneType):
            yield one


@cache
def _decoder(kind: type[Request]) -> msgspec.json.Decoder[Request]:
    return msgspec.json.Decoder(kind)


def _not_json(exc: Exception) -> BadRequest:
    return BadRequest(f"the body is not JSON: {exc}")


def _read_body(body: Any, kind: type[Request]) -> Request:
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {TYPE_NAMES.get(type(body), 'something else')}")
    request: Request = _read_object(body, type_info(kind), "")
    return request


def read(value: Any, node: nodes.Type, path: str) -> Any:
    """`value` as the type that `node` describes; `path` names it in a refusal."""
    options = list(alternatives(node))
    if not options:
        raise Unprocessable(f"`{path}` is not offered by this server", param=path, code="unsupported_field")
    if isinstance(bare(options[0]), nodes.AnyType):
        return value
    fitting = [bare(one) for one in options if _fits(value, one)]
    match fitting:
        case []:
            raise wrong_type(path, value, _expected(options))
        case [nodes.StructType(tag=None) as struct]:
            return _read_object(value, struct, path)
        case [nodes.StructType(), *_]:
            return _read_object(value, _by_tag(value, fitting, path), path)
        case [nodes.DictType() as mapping, *_]:
            return _read_mapping(value, mapping, path)
        case [nodes.ListType() as array, *_]:
            return _read_array(value, array, path)
        case [scalar, *_]:
            return _read_scalar(value, scalar, path)


def _fits(value: Any, node: nodes.Type) -> bool:
    """Whether a value has the right JSON type; JSON has one kind of number, and some clients write 8 as 8.0."""
    wanted, given = NODE_KINDS[type(bare(node))], type(value)
    if given is int and wanted is float:
        return True
    exact = isinstance(node, nodes.Metadata) and node.extra is not None and "exact" in node.extra
    return given is wanted or (given is float and wanted is int and value.is_integer() and not exact)


def _expected(options: Sequence[nodes.Type]) -> str:
    words = list(dict.fromkeys(map(_described, options)))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _described(node: nodes.Type) -> str:
    node = bare(node)
    if not isinstance(node, nodes.ListType):
        return TYPE_NAMES[NODE_KINDS[type(node)]]
    return "an array of " + " or ".join(
        dict.fromkeys(TYPE_NAMES[NODE_KINDS[type(bare(one))]].split()[1] + "s" for one in alternatives(node.item_type))
    )


def _read_scalar(value: Any, node: nodes.Type, path: str) -> Any:
    match node:
        case nodes.IntType(ge=low, le=high):
            value = int(value)
            if low is not None and value < low:
                raise out_of_range(path, value, f"at least {low}")
            if high is not None and value > high:
                raise out_of_range(path, value, f"at most {high}")
        case nodes.FloatType(ge=low, le=high) if low is not None and high is not None:
            if not low <= value <= high:
                least = "greater than 0" if low == SMALLEST else f"at least {low:g}"
                raise out_of_range(path, value, f"{least} and at most {high:g}")
            value = float(value)
        case nodes.LiteralType(values=values) if value not in values:
            raise out_of_range(path, value, f"one of {', '.join(map(str, values))}")
        case nodes.StrType(min_length=1) if not value:
            raise out_of_range(path, value, "a string that is not empty")
        case nodes.StrType(pattern=str(pattern)) if not re.search(pattern, value):
            shown = pattern.removeprefix("^").removesuffix(r"\Z")
            raise out_of_range(path, value, f"a string of the form {shown}")
    return value


def _read_array(value: list[Any], node: nodes.ListType, path: str) -> list[Any]:
    """A refusal names the entry (`messages[2].role`) where entries are objects, and else the array."""
    if node.min_length and not value:
        raise empty(path)
    if node.max_length is not None and len(value) > node.max_length:
        raise Unprocessable(f"`{path}` may have at most {node.max_length} entries", param=path, code="out_of_range")
    objects = any(isinstance(bare(one), nodes.StructType) for one in alternatives(node.item_type))
    return [read(entry, node.item_type, f"{path}[{i}]" if objects else path) for i, entry in enumerate(value)]


def _read_mapping(value: dict[Any, Any], node: nodes.DictType, path: str) -> dict[Any, Any]:
    key_node = bare(node.key_type)
    if not isinstance(key_node, nodes.IntType):
        return value
    for key in value:
        if not (str(key).isascii() and str(key).isdigit() and int(key) <= (key_node.le or MOST)):
            raise out_of_range(path, key, "an object whose keys are token ids")
    return {int(key): read(entry, node.value_type, path) for key, entry in value.items()}


def _by_tag(value: dict[str, Any], structs: Sequence[Any], path: str) -> nodes.StructType:
    field = structs[0].tag_field
    by_tag: dict[Any, nodes.StructType] = {struct.tag: struct for struct in structs}
    tag = value.get(field)
    if tag is None:
        for struct in structs:
            if struct.cls.DEFAULT_TYPE:
                return by_tag[struct.tag]
        raise _missing(f"{path}.{field}")
    _check_tag(tag, list(by_tag), structs[0].cls, f"{path}.{field}")
    return by_tag[tag]


def _check_tag(tag: Any, known: Sequence[Any], kind: type[RequestModel], path: str) -> None:
    if type(tag) is not str:
        raise wrong_type(path, tag, "a string")
    if tag not in known:
        expected = f"one of {', '.join(known)}" if len(known) > 1 else str(known[0])
        if kind.UNKNOWN_TYPE == "out_of_range":
            raise out_of_range(path, tag, expected)
        raise Unprocessable(
            f"`{path}` must be {expected}: {tag!r:.80} is not offered by this server",
            param=path, code=kind.UNKNOWN_TYPE,
        )  # fmt: skip


def _missing(path: str) -> BadRequest:
    return BadRequest(f"`{path}` is missing", param=path, code="missing_field")


def _read_object(value: dict[str, Any], node: nodes.StructType, path: str) -> Any:
    kind: Any = node.cls
    prefix = f"{path}." if path else ""
    fields = {field.encode_name: field for field in node.fields}
    _check_type_field(value, fields, kind, prefix)
    for name, entry in value.items():
        if name in kind.ONLY:
            _check_only(prefix + name, entry, kind.ONLY[name])
        elif name not in fields and name != node.tag_field:
            raise Unprocessable(f"unknown field `{prefix}{name}`", param=prefix + name, code="unknown_field")
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if (entry := value.get(name)) is not None:
            arguments[field.name] = read(entry, field.type, prefix + name)
        elif field.required:
            raise _missing(prefix + name)
    try:
        return kind(**arguments)
    except FieldError as error:
        raise error.at(prefix) from None


def _check_type_field(
    value: dict[str, Any], fields: Mapping[str, nodes.Field], kind: type[RequestModel], prefix: str
) -> None:
    """Before all other fields: an object of another type has fields of its own, none of which is to blame."""
    if "type" in fields and (tag := value.get("type")) is not None:
        for node in alternatives(fields["type"].type):
            if isinstance(literal := bare(node), nodes.LiteralType):
                _check_tag(tag, literal.values, kind, f"{prefix}type")


def _check_only(path: str, value: Any, harmless: Sequence[Any]) -> None:
    """An unsupported field: only values that leave the feature off are accepted."""
    if value is not None and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    ):
        allowed = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
        raise Unprocessable(
            f"`{path}` is not offered by this server, except as {allowed}", param=path, code="unsupported_field"
        )
