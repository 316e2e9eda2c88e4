"""Reads the fields of a request body by a table, so that every refusal names its field and what was expected.

A `Reader` takes a field's name and its JSON value and returns what the code works with. It raises BadRequest for
the wrong JSON type and Unprocessable for a value out of range; its `schema` tells others what it takes. Knows no
dialect.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.errors import BadRequest, SluiceError, Unprocessable

TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}

JSON_TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}

Schema = Mapping[str, Any]  # JSON Schema, 2020-12
MOST = (1 << 31) - 1  # of an integer: no tensor and no counter wraps
LARGEST, SMALLEST = 3.4e38, 2.0**-126  # of a number: float32's, in which the worker computes
NOTHING: Schema = {"not": {}}  # no value at all


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one value, given the name that a refusal says; `schema` is of the values that it takes."""

    schema: Schema
    read: Callable[[str, Any], Any]

    def __call__(self, name: str, value: Any) -> Any:
        return self.read(name, value)


def reads(schema: Schema) -> Callable[[Callable[[str, Any], Any]], Reader]:
    """Decorator: a function of a name and a value as a Reader."""
    return lambda function: Reader(schema, function)


@dataclass(frozen=True, slots=True)
class Field:
    """How to read one field; absent or null is read as `default`, unless `required`.

    `fallback`: where a request's None is replaced later, by what the checkpoint recommends or else by this.
    """

    reader: Reader
    default: Any = None
    required: bool = False
    fallback: Any = None

    @property
    def effective_default(self) -> Any:
        return self.default if self.fallback is None else self.fallback


Table = Mapping[str, Field]


def schema(table: Table) -> dict[str, Any]:
    """What `read` takes, as a JSON Schema; fields that are refused whatever they say are left out."""
    fields = {name: field for name, field in table.items() if field.reader.schema is not NOTHING}
    return {
        "type": "object",
        "properties": {name: _field_schema(field) for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> Schema:
    """Without the default where a client could not send it: no `top_k` at all is 0 inside."""
    if field.required or not field.reader.schema:
        return field.reader.schema
    try:
        field.reader("", field.effective_default)
    except SluiceError:
        return {"anyOf": [field.reader.schema, {"type": "null"}]}
    return {"anyOf": [field.reader.schema, {"type": "null"}], "default": field.effective_default}


def decode(body: bytes) -> dict[str, Any]:
    """A JSON object as plain Python values; raises BadRequest."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"the body is not JSON: {exc}") from None
    if type(value) is not dict:
        raise BadRequest(f"the body must be a JSON object, not {TYPE_NAMES[type(value)]}")
    return value


def read(table: Table, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every field of the table, read or defaulted; what the table does not know is refused.

    `path` leads to `body` in the whole request ("messages[0].") and stands before the names in refusals.
    """
    for name in body:
        if name not in table:
            raise Unprocessable(f"unknown field `{path}{name}`", param=path + name, code="unknown_field")
    return {name: _one(path + name, field, body.get(name)) for name, field in table.items()}


def _one(name: str, field: Field, value: Any) -> Any:
    if value is not None:
        return field.reader(name, value)
    if field.required:
        raise BadRequest(f"`{name}` is missing", param=name, code="missing_field")
    return field.default


def wrong_type(name: str, value: Any, expected: str) -> BadRequest:
    found = TYPE_NAMES.get(type(value), "something else")
    return BadRequest(f"`{name}` must be {expected}, not {found}", param=name, code="wrong_type")


def out_of_range(name: str, value: Any, expected: str) -> Unprocessable:
    return Unprocessable(f"`{name}` must be {expected}, got {value!r:.80}", param=name, code="out_of_range")


def unknown_type(name: str, kind: str, expected: str, code: str = "unsupported_content") -> Unprocessable:
    """For an object whose `type` is none that is offered; its fields are not looked at."""
    return Unprocessable(
        f"`{name}.type` must be {expected}: {kind!r:.80} is not offered by this server", param=f"{name}.type", code=code
    )


def integer(low: int, high: int = MOST) -> Reader:
    @reads({"type": "integer", "minimum": low, "maximum": high})
    def reader(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)  # JSON has one kind of number: some write 8 as 8.0
        if type(value) is not int:
            raise wrong_type(name, value, "an integer")
        if not low <= value <= high:
            raise out_of_range(name, value, f"at least {low}" if value < low else f"at most {high}")
        return value

    return reader


def number(low: float, high: float = LARGEST, *, above: bool = False) -> Reader:
    """A number from `low` (or, with `above`, greater than it) to `high`; integers are welcome.

    What is too small for the worker's float32 is 0.
    """
    least = low + SMALLEST if above else low
    expected = f"{'greater than' if above else 'at least'} {low:g} and at most {high:g}"

    @reads({"type": "number", "minimum": least, "maximum": high})
    def reader(name: str, value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(name, value, "a number")
        if not least <= value <= high:
            raise out_of_range(name, value, expected)
        return float(value) if abs(value) >= SMALLEST else 0.0

    return reader


def exactly(kind: type) -> Reader:
    """A JSON value of one type, whatever its content."""

    @reads({"type": JSON_TYPES[kind]})
    def reader(name: str, value: Any) -> Any:
        if type(value) is not kind:
            raise wrong_type(name, value, TYPE_NAMES[kind])
        return value

    return reader


boolean = exactly(bool)


def choice(*options: str) -> Reader:
    @reads({"type": "string", "enum": list(options)})
    def reader(name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong_type(name, value, "a string")
        if value not in options:
            raise out_of_range(name, value, f"one of {', '.join(options)}")
        return value

    return reader


@reads({})
def anything(name: str, value: Any) -> Any:
    return value


@reads(NOTHING)
def refused(name: str, value: Any) -> Any:
    raise Unprocessable(f"`{name}` is not offered by this server", param=name, code="unsupported_field")


def list_of(item: Reader, most: int) -> Reader:
    @reads({"type": "array", "items": item.schema, "maxItems": most})
    def reader(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(name, value, "an array")
        if len(value) > most:
            raise Unprocessable(f"`{name}` may have at most {most} entries", param=name, code="out_of_range")
        return tuple(item(name, entry) for entry in value)

    return reader


@reads({"type": "string", "minLength": 1})
def some_text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(name, value, "a string")
    if not value:
        raise out_of_range(name, value, "a string that is not empty")
    return value


def one_or_more(item: Reader, most: int) -> Reader:
    """A value, or an array of them; always a tuple afterwards."""
    several = list_of(item, most)

    @reads({"anyOf": [item.schema, several.schema]})
    def reader(name: str, value: Any) -> tuple[Any, ...]:
        return several(name, value) if type(value) is list else (item(name, value),)

    return reader


_integer64 = integer(-(1 << 63), (1 << 64) - 1)


@reads(_integer64.schema)
def seed(name: str, value: Any) -> int:
    """Any 64-bit integer, signed or not, as unsigned."""
    return int(_integer64(name, value)) % (1 << 64)


_bias = number(-100, 100)


@reads({"type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": _bias.schema})
def bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """`{"token id": bias}`; the vocabulary is checked where it is known."""
    if type(value) is not dict:
        raise wrong_type(name, value, "an object of token ids and biases")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise out_of_range(name, key, "an object whose keys are token ids")
    return tuple((int(key), _bias(name, entry)) for key, entry in value.items())


def record(table: Table) -> Reader:
    """An object whose fields a table of their own knows."""

    @reads(schema(table))
    def reader(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(name, value, "an object")
        return read(table, value, f"{name}.")

    return reader


def flags(*names: str) -> Reader:
    """An object of booleans, all optional."""
    return record({name: Field(boolean, False) for name in names})


def each(item: Reader, most: int, *, empty: bool = False) -> Reader:
    """An array that is not empty, unless it may be; a refusal names the entry, as in `messages[2].role`."""

    @reads({"type": "array", "items": item.schema, "minItems": 0 if empty else 1, "maxItems": most})
    def reader(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(name, value, "an array")
        if not value and not empty:
            raise BadRequest(f"`{name}` is empty", param=name, code="empty_prompt")
        if len(value) > most:
            raise Unprocessable(f"`{name}` may have at most {most} entries", param=name, code="out_of_range")
        return tuple([item(f"{name}[{i}]", entry) for i, entry in enumerate(value)])

    return reader


def only(*harmless: Any) -> Reader:
    """A field of something not offered: these values, which do not ask for it, may be sent all the same."""

    @reads({"enum": list(harmless)})
    def reader(name: str, value: Any) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless):
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
            raise Unprocessable(
                f"`{name}` is not offered by this server, except as {allowed}", param=name, code="unsupported_field"
            )
        return value

    return reader
