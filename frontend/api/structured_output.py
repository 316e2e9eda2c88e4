"""Structured output: the fields of OpenAI, vLLM and Anthropic that ask for it, and the one grammar they mean.

Knows the fields; `frontend/text/grammar_builder.py` knows what they turn into. Reading a field looks at its JSON types
only: `grammar` builds the grammar, and refuses it, off the event loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from frontend.api.fields import (
    Field,
    Reader,
    Table,
    anything,
    boolean,
    choice,
    exactly,
    list_of,
    only,
    out_of_range,
    read,
    reads,
    record,
    refused,
    schema,
    some_text,
    wrong_type,
)
from frontend.errors import Unprocessable
from frontend.text import grammar_builder

MAX_CHOICES = 4096
MAX_COPIED = 16 << 20  # characters of grammar that one request may send to the worker


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A field that asks for a form, and how its grammar is grammar_builder."""

    param: str
    make: Callable[[], str]


@reads({"type": ["object", "boolean", "string"]})
def json_schema(name: str, value: Any) -> StructuredOutput:
    """A schema, or the text of one."""
    if type(value) not in (dict, bool, str):
        raise wrong_type(name, value, "a JSON schema")
    return StructuredOutput(name, partial(_json_schema, value, name))


def _json_schema(value: Any, name: str) -> str:
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Unprocessable(f"`{name}` is not JSON: {error}", param=name, code="invalid_grammar") from None
    if type(value) not in (dict, bool):
        raise out_of_range(name, value, "a JSON schema")
    return grammar_builder.json_schema(value, name)


@reads(boolean.schema)
def json_object(name: str, value: Any) -> StructuredOutput | None:
    """vLLM's flag for any object."""
    return StructuredOutput(name, partial(grammar_builder.json_object, name)) if boolean(name, value) else None


@reads(some_text.schema)
def regex(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(name, partial(grammar_builder.regex, some_text(name, value), name))


_options = list_of(exactly(str), MAX_CHOICES)


@reads(_options.schema)
def options(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(name, partial(grammar_builder.one_of, _options(name, value), name))


@reads(some_text.schema)
def lark(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput(name, partial(grammar_builder.lark, some_text(name, value), name))


_SCHEMA: Table = {
    "name": Field(some_text),
    "description": Field(anything),
    "strict": Field(boolean),
    "schema": Field(json_schema, required=True),
}
_OF_SCHEMA: Table = {"type": Field(choice("json_schema"), required=True)}
OF_SCHEMA: Table = {**_OF_SCHEMA, "json_schema": Field(record(_SCHEMA), required=True)}
FLAT_SCHEMA: Table = {**_OF_SCHEMA, **_SCHEMA}
OF_NONE: Table = {"type": Field(choice("text", "json_object"), required=True)}


def _format(of_schema: Table, of_none: Table, inside: Callable[[dict[str, Any]], Any]) -> Reader:
    """OpenAI's, whose schema is found `inside`. `strict` changes nothing: an answer always keeps to the schema."""

    @reads({"anyOf": [schema(of_schema), schema(of_none)]})
    def reader(name: str, value: Any) -> Any:
        if type(value) is not dict:
            raise wrong_type(name, value, "an object")
        if value.get("type") == "json_schema":
            return inside(read(of_schema, value, f"{name}."))
        return json_object(name, read(of_none, value, f"{name}.")["type"] == "json_object")

    return reader


response_format = _format(
    OF_SCHEMA, {**OF_NONE, "json_schema": Field(refused)}, lambda said: said["json_schema"]["schema"]
)
text_format = _format(FLAT_SCHEMA, OF_NONE, lambda said: said["schema"])


OUTPUTS: Table = {
    "json": Field(json_schema),
    "json_object": Field(json_object),
    "regex": Field(regex),
    "choice": Field(options),
    "grammar": Field(lark),
}

GUIDED: Table = {
    "guided_json": Field(json_schema),
    "guided_regex": Field(regex),
    "guided_choice": Field(options),
    "guided_grammar": Field(lark),
    "structured_outputs": Field(record(OUTPUTS), {}),  # vLLM's newer spelling
}

FIELDS: Table = {"response_format": Field(response_format), **GUIDED}

TEXT: Table = {  # of OpenAI's responses
    "format": Field(text_format),
    "verbosity": Field(only("medium")),
}

OUTPUT_CONFIG: Table = {  # Anthropic's
    "format": Field(
        record({"type": Field(choice("json_schema"), required=True), "schema": Field(json_schema, required=True)})
    ),
    "effort": Field(choice("low", "medium", "high", "xhigh", "max")),
}


def openai(values: Mapping[str, Any]) -> list[StructuredOutput]:
    """Of a body whose table has FIELDS."""
    return _given(values["response_format"], values)


def responses(values: Mapping[str, Any]) -> list[StructuredOutput]:
    """Of a body whose table has TEXT under `text`, and GUIDED."""
    return _given(values["text"].get("format"), values)


def _given(form: StructuredOutput | None, values: Mapping[str, Any]) -> list[StructuredOutput]:
    named = [values[name] for name in GUIDED if name != "structured_outputs"]
    return [one for one in (form, *named, *values["structured_outputs"].values()) if one is not None]


def anthropic(values: Mapping[str, Any]) -> list[StructuredOutput]:
    """Of a body whose table has OUTPUT_CONFIG under `output_config`."""
    wanted = values["output_config"].get("format")
    return [wanted["schema"]] if wanted else []


async def grammar(wanted: list[StructuredOutput], copies: int = 1) -> str:
    """The one grammar, empty for none; `copies`: how many sequences will bring it to the worker.

    Raises Unprocessable when there are two, it is none, or so many copies are too much.
    """
    if len(wanted) > 1:
        names = " and ".join(f"`{one.param}`" for one in wanted)
        raise Unprocessable(
            f"an answer can have one form only: {names} are given", param=wanted[1].param, code="conflicting_fields"
        )
    if not wanted:
        return ""
    text, param = await grammar_builder.in_thread(wanted[0].make), wanted[0].param
    if len(text) * copies > MAX_COPIED:
        raise Unprocessable(
            f"`{param}` is too large for {copies} answers in one request", param=param, code="out_of_range"
        )
    return text
