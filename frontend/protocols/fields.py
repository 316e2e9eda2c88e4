"""Reads the fields of a request body by a table, so that every refusal names its field and what was expected.

A `Reader` takes a field's name and its JSON value and returns what the code works with. It raises BadRequest for
the wrong JSON type and Unprocessable for a value out of range. Knows no dialect.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.errors import BadRequest, Unprocessable

TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}

Reader = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """How to read one field; absent or null means `default`, unless `required`."""

    reader: Reader
    default: Any = None
    required: bool = False


Table = Mapping[str, Field]


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


def integer(low: int, high: int | None = None) -> Reader:
    expected = f"at least {low}" if high is None else f"from {low} to {high}"

    def reader(name: str, value: Any) -> int:
        if type(value) is not int:
            raise wrong_type(name, value, "an integer")
        if value < low or (high is not None and value > high):
            raise out_of_range(name, value, expected)
        return value

    return reader


def number(low: float, high: float = math.inf, *, above: bool = False) -> Reader:
    """A finite number from `low` (or, with `above`, greater than it) to `high`; integers are welcome."""
    least = f"greater than {low:g}" if above else f"at least {low:g}"
    expected = least if high == math.inf else f"{least} and at most {high:g}"

    def reader(name: str, value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(name, value, "a number")
        if not abs(value) < 1e300:
            raise out_of_range(name, value, "finite")
        if value < low or value > high or (above and value == low):
            raise out_of_range(name, value, expected)
        return float(value)

    return reader


def exactly(kind: type) -> Reader:
    """A JSON value of one type, whatever its content."""

    def reader(name: str, value: Any) -> Any:
        if type(value) is not kind:
            raise wrong_type(name, value, TYPE_NAMES[kind])
        return value

    return reader


boolean = exactly(bool)


def choice(*options: str) -> Reader:
    def reader(name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong_type(name, value, "a string")
        if value not in options:
            raise out_of_range(name, value, f"one of {', '.join(options)}")
        return value

    return reader


def anything(name: str, value: Any) -> Any:
    return value


def refused(name: str, value: Any) -> Any:
    raise Unprocessable(f"`{name}` is not offered by this server", param=name, code="unsupported_field")


def list_of(item: Reader, most: int) -> Reader:
    def reader(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(name, value, "an array")
        if len(value) > most:
            raise Unprocessable(f"`{name}` may have at most {most} entries", param=name, code="out_of_range")
        return tuple(item(name, entry) for entry in value)

    return reader


def some_text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise wrong_type(name, value, "a string")
    if not value:
        raise out_of_range(name, value, "a string that is not empty")
    return value


def one_or_more(item: Reader, most: int) -> Reader:
    """A value, or an array of them; always a tuple afterwards."""
    several = list_of(item, most)

    def reader(name: str, value: Any) -> tuple[Any, ...]:
        return several(name, value) if type(value) is list else (item(name, value),)

    return reader


def seed(name: str, value: Any) -> int:
    """Any 64-bit integer, signed or not, as unsigned."""
    return int(integer(-(1 << 63), (1 << 64) - 1)(name, value)) % (1 << 64)


def bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """`{"token id": bias}`; the vocabulary is checked where it is known."""
    if type(value) is not dict:
        raise wrong_type(name, value, "an object of token ids and biases")
    within = number(-100, 100)
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise out_of_range(name, key, "an object whose keys are token ids")
    return tuple((int(key), within(name, entry)) for key, entry in value.items())


def record(table: Table) -> Reader:
    """An object whose fields a table of their own knows."""

    def reader(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(name, value, "an object")
        return read(table, value, f"{name}.")

    return reader


def flags(*names: str) -> Reader:
    """An object of booleans, all optional."""
    return record({name: Field(boolean, False) for name in names})


def each(item: Reader, most: int) -> Reader:
    """An array that is not empty; a refusal names the entry, as in `messages[2].role`."""

    def reader(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(name, value, "an array")
        if not value:
            raise BadRequest(f"`{name}` is empty", param=name, code="empty_prompt")
        if len(value) > most:
            raise Unprocessable(f"`{name}` may have at most {most} entries", param=name, code="out_of_range")
        return tuple([item(f"{name}[{i}]", entry) for i, entry in enumerate(value)])

    return reader


def only(*harmless: Any) -> Reader:
    """A field of something not offered: these values, which do not ask for it, may be sent all the same."""

    def reader(name: str, value: Any) -> Any:
        if value not in harmless:
            allowed = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
            raise Unprocessable(
                f"`{name}` is not offered by this server, except as {allowed}", param=name, code="unsupported_field"
            )
        return value

    return reader
