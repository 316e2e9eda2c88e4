"""Decodes a request body into its type, or refuses it with an error that names the field.

msgspec decodes a body that matches its type exactly, in one pass. Every other body is read field by field in Python, by
the same type. This second reading also accepts null for a field with a default, 8.0 for an integer, an object without
its optional type, a string in place of an object that may be one, and the harmless values of unsupported features. It
refuses everything else: with BadRequest a wrong JSON type, a missing field or an empty array; with Unprocessable a
value out of range and an unsupported field. The caller decides whether unknown fields are refused or dropped.

Knows no API format and no field.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from math import isinf
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import inspect as nodes

from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.schema.base import (
    LARGEST,
    SMALLEST,
    TYPE_NAMES,
    FieldError,
    RequestModel,
    alternatives,
    bare,
    out_of_range,
    type_info,
    wrong_type,
)
from frontend.schema.refusal_reasons import because

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
TOKEN_ID_DIGITS = 10
Request = TypeVar("Request", bound=RequestModel)
OnUnknown = Callable[[str], None]  # called with the path of an unknown field, which is dropped if nothing is raised
Reader = Callable[[Any, str, OnUnknown], Any]


def refuse_unknown(path: str) -> None:
    raise Unprocessable(f"unknown field `{path}`", param=path, code="unknown_field")


def decode(body: bytes, kind: type[Request], on_unknown: OnUnknown = refuse_unknown) -> Request:
    """Returns the body as `kind`. Raises BadRequest or Unprocessable."""
    try:
        return decode_valid(body, kind)
    except msgspec.ValidationError:
        return _read_body(decode_json(body), kind, on_unknown)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise not_json(exc, body) from None


MOST_CONTAINERS = 1 << 18  # arrays and objects in a body: each takes 0.3 µs to decode and 240 bytes
MOST_STRINGS = 1 << 19  # strings and keys in a body
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # one without an end goes on to the end of the body


def check_values(body: bytes) -> None:
    """Raises BadRequest for JSON with more than MOST_CONTAINERS arrays and objects, or MOST_STRINGS strings and keys.

    `[[],[],[]]` takes 80 times its length as Python's lists, and a second for each 8 MiB, without a pause.
    """
    if len(body) <= 2 * MOST_CONTAINERS or len(body) - len(body.translate(None, b'[{"')) <= MOST_CONTAINERS:
        return
    if body.count(b'"') - body.count(rb"\"") > 2 * MOST_STRINGS:
        raise BadRequest(f"the body may have at most {MOST_STRINGS} strings and keys", code="out_of_range")
    # brackets in strings are looked for only if there may be too many others
    if _containers(body) > MOST_CONTAINERS and _containers(_STRING.sub(b"", body)) > MOST_CONTAINERS:
        raise BadRequest(f"the body may have at most {MOST_CONTAINERS} arrays and objects", code="out_of_range")


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def convert(body: Mapping[str, Any], kind: type[Request]) -> Request:
    """Does the same as `decode` for a body of plain Python values."""
    try:
        return msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError:
        return _read_body(body, kind, refuse_unknown)


def decode_valid(body: bytes, kind: type[Request]) -> Request:
    """Does the same as `decode` for a body without errors. Raises msgspec's errors for others."""
    request: Request = _decoder(kind).decode(body)
    return request


def decode_json(body: bytes) -> Any:
    """Returns the body as plain Python values. Raises BadRequest."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise not_json(exc, body) from None


@cache
def _decoder(kind: type[Request]) -> msgspec.json.Decoder[Request]:
    return msgspec.json.Decoder(kind)


@cache
def _object_reader(kind: type[RequestModel]) -> Reader:
    return _of_object(type_info(kind))


def _read_body(body: Any, kind: type[Request], on_unknown: OnUnknown) -> Request:
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {TYPE_NAMES.get(type(body), 'something else')}")
    request: Request = _object_reader(kind)(body, "", on_unknown)
    return request


# The readers: each is a function of a value, its path, and the callback for unknown fields within the value.


def reader(node: nodes.Type) -> Reader:
    """Returns a function that reads a value (other than null) of the type that `node` describes."""
    options = list(alternatives(node))
    if not options:
        return _refuse
    if isinstance(bare(options[0]), nodes.AnyType):
        return lambda value, path, unknown: value
    readers: dict[type, Reader] = {}
    for option in options:
        readers |= _by_json_type(option)
    structs = [one for one in map(bare, options) if isinstance(one, nodes.StructType)]
    if len(structs) > 1:
        readers[dict] = _of_tagged(structs)
    expected = _expected(options)

    def read(value: Any, path: str, unknown: OnUnknown) -> Any:
        if (fitting := readers.get(type(value))) is None:
            raise wrong_type(path, value, expected)
        return fitting(value, path, unknown)

    return read


def _refuse(value: Any, path: str, unknown: OnUnknown) -> Any:
    raise Unprocessable(
        f"`{path}` is not supported by this server{because(path)}", param=path, code="unsupported_field"
    )


def _by_json_type(option: nodes.Type) -> dict[type, Reader]:
    """Returns the readers of this type, by the Python type of the decoded JSON value.

    JSON does not distinguish integers from other numbers, so 8.0 is also read as an integer, unless the type demands an
    exact integer, and 8 is also read as a number.
    """
    match node := bare(option):
        case nodes.IntType(ge=low, le=high):
            exact = isinstance(option, nodes.Metadata) and "exact" in (option.extra or {})
            integer = _of_integer(low, high)
            return {int: integer} if exact else {int: integer, float: integer}
        case nodes.FloatType(ge=low, le=high):
            number = _of_number(-LARGEST if low is None else low, LARGEST if high is None else high)
            return {int: number, float: number}
        case nodes.LiteralType(values=values):
            return {str: _of_literal(values)}
        case nodes.StrType(min_length=least, max_length=most, pattern=pattern):
            return {str: _of_string(bool(least), most, pattern)}
        case nodes.ListType():
            return {list: _of_array(node)}
        case nodes.DictType(key_type=nodes.IntType() | nodes.Metadata()):
            return {dict: _of_token_ids(node)}
        case nodes.DictType(key_type=nodes.StrType()) if not isinstance(bare(node.value_type), nodes.AnyType):
            return {dict: _of_names(node)}
        case nodes.StructType():
            return _of_struct(node)
    return {NODE_KINDS[type(node)]: lambda value, path, unknown: value}


def _expected(options: Sequence[nodes.Type]) -> str:
    words = list(dict.fromkeys(map(_described, options)))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _described(node: nodes.Type) -> str:
    node = bare(node)
    if not isinstance(node, nodes.ListType) or isinstance(bare(node.item_type), nodes.AnyType):
        return TYPE_NAMES[NODE_KINDS[type(node)]]
    entries = [TYPE_NAMES[NODE_KINDS[type(bare(one))]].split()[1] + "s" for one in alternatives(node.item_type)]
    return "an array of " + " or ".join(dict.fromkeys(entries))


def _of_integer(low: int | None, high: int | None) -> Reader:
    def read(value: float, path: str, unknown: OnUnknown) -> int:
        if isinstance(value, float) and not value.is_integer():
            raise wrong_type(path, value, "an integer")
        whole = int(value)
        if low is not None and whole < low:
            raise out_of_range(path, whole, f"at least {low}")
        if high is not None and whole > high:
            raise out_of_range(path, whole, f"at most {high}")
        return whole

    return read


def _of_number(low: float, high: float) -> Reader:
    least = "greater than 0" if low == SMALLEST else f"at least {low:g}"

    def read(value: float, path: str, unknown: OnUnknown) -> float:
        if not low <= value <= high:
            raise out_of_range(path, value, f"{least} and at most {high:g}")
        return float(value)

    return read


def _of_literal(values: Sequence[Any]) -> Reader:
    def read(value: str, path: str, unknown: OnUnknown) -> str:
        if value not in values:
            raise out_of_range(path, value, f"one of {', '.join(values)}")
        return value

    return read


def _of_string(some: bool, most: int | None, pattern: str | None) -> Reader:
    def read(value: str, path: str, unknown: OnUnknown) -> str:
        if some and not value:
            raise out_of_range(path, value, "a string that is not empty")
        if most is not None and len(value) > most:
            raise Unprocessable(f"`{path}` may have at most {most} characters", param=path, code="out_of_range")
        if pattern and not re.search(pattern, value):
            raise out_of_range(path, value, f"a string of the form {pattern[1:-2]}")
        return value

    return read


def _of_array(node: nodes.ListType) -> Reader:
    """Returns the reader of an array. Errors name the entry: `messages[2].role`, `stop[0]`."""
    item = reader(node.item_type)
    objects = any(isinstance(bare(one), nodes.StructType) for one in alternatives(node.item_type))

    def read(value: list[Any], path: str, unknown: OnUnknown) -> list[Any]:
        _check_count(path, len(value), node)
        if not objects:  # there may be millions of ids: their places are counted only if one is wrong
            with suppress(SluiceError):
                return [item(entry, path, unknown) for entry in value]
        return [item(entry, f"{path}[{i}]", unknown) for i, entry in enumerate(value)]

    return read


def _check_count(path: str, count: int, node: nodes.ListType | nodes.DictType) -> None:
    """Raises BadRequest for an array or object that is empty and must not be, Unprocessable for another wrong size."""
    least, most = node.min_length or 0, node.max_length
    if least and not count:
        raise BadRequest(f"`{path}` is empty", param=path, code="empty_prompt")
    if count < least:
        raise Unprocessable(f"`{path}` must have at least {least} entries", param=path, code="out_of_range")
    if most is not None and count > most:
        raise Unprocessable(f"`{path}` may have at most {most} entries", param=path, code="out_of_range")


def _of_token_ids(node: nodes.DictType) -> Reader:
    item = reader(node.value_type)

    def read(value: dict[Any, Any], path: str, unknown: OnUnknown) -> dict[int, Any]:
        for key in map(str, value):
            if not (key.isascii() and key.isdigit() and len(key) <= TOKEN_ID_DIGITS):
                raise out_of_range(path, key, "an object whose keys are token ids")
        return {int(key): item(entry, path, unknown) for key, entry in value.items()}

    return read


def _of_names(node: nodes.DictType) -> Reader:
    """Returns the reader of an object whose names are the client's own."""
    item = reader(node.value_type)
    nullable = any(isinstance(one, nodes.NoneType) for one in getattr(bare(node.value_type), "types", ()))

    def read(value: dict[str, Any], path: str, unknown: OnUnknown) -> dict[str, Any]:
        _check_count(path, len(value), node)
        return {
            name: None if entry is None and nullable else item(entry, f"{path}.{name:.80}", unknown)
            for name, entry in value.items()
        }

    return read


def _of_struct(node: nodes.StructType) -> dict[type, Reader]:
    readers: dict[type, Reader] = {dict: _of_tagged([node]) if node.tag_field else _of_object(node)}
    if field := node.cls.FROM_TEXT:  # type: ignore[attr-defined]
        whole = _of_object(node)
        readers[str] = lambda value, path, unknown: whole({field: value}, path, unknown)
    return readers


def _of_tagged(structs: Sequence[nodes.StructType]) -> Reader:
    field = str(structs[0].tag_field)
    kinds: dict[str, Any] = {str(struct.tag): struct.cls for struct in structs}
    readers = {str(struct.tag): _of_object(struct) for struct in structs}
    default = next((tag for tag, one in kinds.items() if one.DEFAULT_TYPE), None)
    known_by = {one.KNOWN_BY: tag for tag, one in kinds.items() if one.KNOWN_BY}
    kind: Any = structs[0].cls

    def untagged(value: Mapping[str, Any]) -> str | None:
        found = [tag for name, tag in known_by.items() if value.get(name) is not None]
        return found[0] if len(found) == 1 else default

    def read(value: dict[str, Any], path: str, unknown: OnUnknown) -> Any:
        tag = untagged(value) if value.get(field) is None else value[field]
        if tag is None:
            raise _missing(f"{path}.{field}")
        _check_tag(tag, list(readers), kind, f"{path}.{field}")
        return readers[tag](value, path, unknown)

    return read


def _check_tag(tag: Any, known: Sequence[str], kind: type[RequestModel], path: str) -> None:
    if type(tag) is not str:
        raise wrong_type(path, tag, "a string")
    if tag in known:
        return
    expected = f"one of {', '.join(known)}" if len(known) > 1 else known[0]
    if kind.UNKNOWN_TYPE == "out_of_range":
        raise out_of_range(path, tag, expected)
    message = f"`{path}` must be {expected}: {tag!r:.80} is not supported by this server"
    raise Unprocessable(message, param=path, code=kind.UNKNOWN_TYPE)


def _missing(path: str) -> BadRequest:
    return BadRequest(f"`{path}` is missing", param=path, code="missing_field")


def _of_object(node: nodes.StructType) -> Reader:
    kind: Any = node.cls
    readers = {field.encode_name: reader(field.type) for field in node.fields}
    attributes = {field.encode_name: field.name for field in node.fields}
    required = [field.encode_name for field in node.fields if field.required]
    types = _literal_types(node)

    def read(value: dict[str, Any], path: str, unknown: OnUnknown) -> Any:
        prefix = f"{path}." if path else ""
        if types and (tag := value.get("type")) is not None:  # an object of another `type` has other fields
            _check_tag(tag, types, kind, f"{prefix}type")
        for name, entry in value.items():
            if name in kind.ONLY:
                _check_only(prefix + name, entry, kind.ONLY[name])
            elif name not in readers and name != node.tag_field:
                unknown(prefix + name)
        for name in required:
            if value.get(name) is None:
                raise _missing(prefix + name)
        fields = {name: entry for name, entry in value.items() if entry is not None and name in readers}
        try:
            given = {attributes[name]: readers[name](entry, prefix + name, unknown) for name, entry in fields.items()}
            return kind(**given)
        except FieldError as error:
            raise error.at(prefix) from None

    return read


def _literal_types(node: nodes.StructType) -> list[str]:
    """Returns the allowed values of the object's field `type`; none if it has no such field."""
    nested = [alternatives(field.type) for field in node.fields if field.encode_name == "type"]
    return [str(value) for one in chain(*nested) if isinstance(one, nodes.LiteralType) for value in one.values]


def _check_only(path: str, value: Any, harmless: Sequence[Any]) -> None:
    """Raises Unprocessable if the value turns an unsupported feature on. harmless: the values that leave it off"""
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless):
        return
    allowed = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
    message = f"`{path}` is not supported by this server, except as {allowed}{because(path)}"
    raise Unprocessable(message, param=path, code="unsupported_field")


# Explains why a request body is not JSON. Knows no field.

# The escape of a high surrogate that no escape of a low surrogate follows. The backslash before `u` must not be
# escaped.
HALF_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})")
# A string, or a number in the first group. Strings are matched so that their digits are not taken for numbers.
TEXT_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"|(-?\d++(?:\.\d+)?+(?:[eE][+-]?\d++)?+)', re.DOTALL)


def not_json(exc: Exception, body: bytes) -> BadRequest:
    """Returns the error for a body that msgspec could not decode. exc: msgspec's error

    Some cases get their own message. For invalid UTF-8, msgspec counts the position from the start of the string, not
    of the body. For half a surrogate pair, and for no body at all, it reports that the body is truncated. A body with a
    number of hundreds of digits, or nested thousands deep, is JSON.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}")
    if half := HALF_CHARACTER.search(body):
        return BadRequest(
            f"the body has half of a character, `{half[1].decode()}` at byte {half.start(1)}: "
            "the text was cut between the two escapes that stand for one character"
        )
    if not body.strip():
        return BadRequest("the body is empty; it must be a JSON object")
    if isinstance(exc, RecursionError):
        return BadRequest("the body is nested too deeply")
    if "out of range" in str(exc):
        large = next((found for found in TEXT_OR_NUMBER.finditer(body) if found[1] and isinf(float(found[1]))), None)
        where = "" if large is None else f", `{large[1].decode():.20}` at byte {large.start()}"
        return BadRequest(f"the body has a number that is too large{where}")
    return BadRequest(f"the body is not JSON: {exc}")


# Refuses the request fields that no type declares, or else ignores and reports them: in the response header
# `X-Sluice-Ignored-Fields`, and once in the log.

log = logging.getLogger("sluice.frontend")

STRICT_PATHS = frozenset({"/v1/completions"})  # the paths for which the policy `auto` refuses
MAX_LOGGED = 1000  # limit on logged field names: a client could otherwise fill the log with made-up names
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """The server's policy for unknown fields, and the field names that it has logged."""

    def __init__(self, policy: str) -> None:
        """
        policy: `refuse`, `ignore`, or `auto`: refuse on STRICT_PATHS only
        """
        self._policy = policy
        self._logged: set[str] = set()

    def reader(self, path: str, ignored: dict[str, None]) -> OnUnknown:
        """Returns the callback for the name of each unknown field in a request to `path`.

        ignored: a dict to which the callback adds the ignored names; `[]` in a name stands for any index of an array
        """
        if self._policy == "refuse" or (self._policy == "auto" and path in STRICT_PATHS):
            return refuse_unknown

        def ignore(field: str) -> None:
            name = quote(_INDEX.sub("[]", field), safe="[]")  # in a header, names must be ASCII without commas
            ignored[name] = None
            self._log(name)

        return ignore

    def _log(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(name)
            log.warning(
                "requests have the unknown field %.200s, which is ignored; --unknown-fields refuse refuses them", name
            )
