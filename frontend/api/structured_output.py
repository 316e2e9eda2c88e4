"""Structured output: the fields of OpenAI, vLLM and Anthropic that ask for it, and the one grammar they mean.

Knows the fields; `frontend/text/grammar_builder.py` knows what they turn into. Decoding checks only their JSON types:
`grammar` builds the grammar, and refuses it, off the event loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.request_model import FieldError, RequestModel, out_of_range
from frontend.api.request_types import Ignored, JsonSchemaValue, OpenAIFields, Refused, Text, doc
from frontend.errors import BadRequest, Unprocessable
from frontend.text import grammar_builder
from frontend.text.structural_tag import structural_tag

MAX_TAGS = 128
MAX_COPIED = 16 << 20  # characters of grammar that one request may send to the worker


class PlainText(RequestModel, tag="text"):
    json_schema: Refused = None


class JsonObject(RequestModel, tag="json_object"):
    json_schema: Refused = None


class AnyJsonObject(RequestModel, tag="json_object"):
    """Llama.cpp names a schema here, and TGI does under another name."""

    json_schema: Refused = None
    schema: JsonSchemaValue | None = None
    value: JsonSchemaValue | None = None


class JsonSchema(RequestModel):
    """`strict` changes nothing: an answer always keeps to the schema."""

    schema: JsonSchemaValue
    name: Text | None = None
    description: Ignored = None
    strict: bool | None = None


class JsonSchemaFormat(RequestModel, tag="json_schema"):
    """The schema stands in `json_schema`; in `schema` with llama.cpp and in `value` with TGI."""

    json_schema: JsonSchema | None = None
    schema: JsonSchemaValue | None = None
    value: JsonSchema | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.json_schema, self.schema, self.value) if one is not None]
        if not given:
            raise FieldError("json_schema", "is missing", BadRequest, "missing_field")
        if len(given) > 1:
            raise FieldError("schema", "cannot go with another schema", code="conflicting_fields")


class JsonFormat(RequestModel, tag="json"):
    """TGI's."""

    value: JsonSchemaValue


class RegexFormat(RequestModel, tag="regex"):
    """TGI's."""

    value: Text


class Structure(RequestModel):
    begin: Text
    schema: JsonSchemaValue
    end: str


class StructuralTagFormat(RequestModel, tag="structural_tag"):
    """Free text with tagged parts: `structures` and `triggers`, or xgrammar's `format`."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[Text], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    format: dict[str, Any] | None = None


class FlatJsonSchemaFormat(JsonSchema, tag="json_schema"):
    """The same in OpenAI's responses."""


ResponseFormat = PlainText | AnyJsonObject | JsonSchemaFormat | JsonFormat | RegexFormat | StructuralTagFormat
ResponseFormatField = Annotated[
    ResponseFormat | None,
    doc(
        "`text`, `json_object`, or `json_schema` with the schema that the answer keeps to; also TGI's `json` and "
        "`regex` with a `value`, llama.cpp's `json_object` with a `schema`, and vLLM's `structural_tag`"
    ),
]
TextFormat = PlainText | JsonObject | FlatJsonSchemaFormat


class TextOptions(RequestModel):
    """`text` of OpenAI's responses."""

    ONLY: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema: JsonSchemaValue


class OutputConfig(RequestModel):
    """Anthropic's."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The request field that asked for structured output, and the function that builds its grammar."""

    param: str
    make: Callable[[], str]


def _json_schema(value: Any, name: str) -> str:
    """Builds the grammar of a JSON schema; `value` is the schema or its text."""
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Unprocessable(f"`{name}` is not JSON: {error}", param=name, code="invalid_grammar") from None
    if type(value) not in (dict, bool):
        raise out_of_range(name, value, "a JSON schema")
    return grammar_builder.json_schema(value, name)


GRAMMARS: dict[str, Callable[[Any, str], str]] = {
    "json": _json_schema,
    "regex": grammar_builder.regex,
    "choice": grammar_builder.one_of,
    "grammar": grammar_builder.lark,
    "structural_tag": structural_tag,
}
LLAMA_CPPS = {"grammar": "grammar", "json_schema": "json"}  # its fields, and the kinds of grammar that they hold


def openai(request: OpenAIFields, form: ResponseFormat | TextFormat | None, param: str) -> list[StructuredOutput]:
    """Returns every structured output that a request asks for; `param` is the field that holds `form`."""
    return [*_by_format(form, param), *_guided(request)]


def _by_format(form: ResponseFormat | TextFormat | None, param: str) -> Iterator[StructuredOutput]:
    match form:
        case AnyJsonObject(schema=None, value=None) | JsonObject():
            yield StructuredOutput(param, partial(grammar_builder.json_object, param))
        case AnyJsonObject(schema=schema, value=value):
            name, named = ("value", value) if schema is None else ("schema", schema)
            yield _structured_output("json", named, f"{param}.{name}")
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema)):
            yield _structured_output("json", schema, f"{param}.json_schema.schema")
        case JsonSchemaFormat(value=JsonSchema(schema=schema)):
            yield _structured_output("json", schema, f"{param}.value.schema")
        case JsonSchemaFormat(schema=schema):
            yield _structured_output("json", schema, f"{param}.schema")
        case JsonFormat(value=schema):
            yield _structured_output("json", schema, f"{param}.value")
        case RegexFormat(value=pattern):
            yield _structured_output("regex", pattern, f"{param}.value")
        case StructuralTagFormat():
            yield _structured_output("structural_tag", msgspec.to_builtins(form), param)
        case FlatJsonSchemaFormat(schema=schema):
            yield _structured_output("json", schema, f"{param}.schema")


def _guided(request: OpenAIFields) -> Iterator[StructuredOutput]:
    for kind in GRAMMARS:
        if (value := getattr(request, f"guided_{kind}", None)) is not None:
            yield _structured_output(kind, value, f"guided_{kind}")
    for name, kind in LLAMA_CPPS.items():
        if (value := getattr(request, name, None)) is not None:
            yield _structured_output(kind, value, name)
    if (outputs := request.structured_outputs) is None:
        return
    for kind in GRAMMARS:
        if (value := getattr(outputs, kind)) is not None:
            yield _structured_output(kind, value, f"structured_outputs.{kind}")
    if outputs.json_object:
        param = "structured_outputs.json_object"
        yield StructuredOutput(param, partial(grammar_builder.json_object, param))


def anthropic(config: OutputConfig | None) -> list[StructuredOutput]:
    form = config and config.format
    return [_structured_output("json", form.schema, "output_config.format.schema")] if form else []


def _structured_output(kind: str, value: Any, param: str) -> StructuredOutput:
    return StructuredOutput(param, partial(GRAMMARS[kind], value, param))


async def grammar(requested: list[StructuredOutput], copies: int = 1) -> str:
    """Builds the grammar that is requested; empty if none is. `copies` sequences will bring it to the worker.

    Raises Unprocessable for two grammars, an invalid one, and one that is too large for that many copies.
    """
    if len(requested) > 1:
        names = " and ".join(f"`{one.param}`" for one in requested)
        raise Unprocessable(
            f"an answer can have one form only: {names} are given", param=requested[1].param, code="conflicting_fields"
        )
    if not requested:
        return ""
    text, param = await grammar_builder.in_thread(requested[0].make), requested[0].param
    if len(text) * copies > MAX_COPIED:
        raise Unprocessable(
            f"`{param}` is too large for {copies} answers in one request", param=param, code="out_of_range"
        )
    return text
