"""The fields of OpenAI, vLLM, llama.cpp, TGI and Anthropic that ask for structured output.

Decoding checks only their JSON types; constraints.py makes the grammar.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.errors import BadRequest
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import JsonSchemaValue, OpenAIFields, Text, doc

MAX_TAGS = 128

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
GUIDED: tuple[Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")  # vLLM's `guided_…` fields
OTHERS: dict[str, Kind] = {  # field of llama.cpp or SGLang → the kind of its grammar
    "grammar": "grammar", "json_schema": "json", "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
FIELDS: tuple[tuple[str, Kind], ...] = (*[(f"guided_{kind}", kind) for kind in GUIDED], *OTHERS.items())


class PlainText(RequestModel, tag="text"):
    REFUSED: ClassVar[Names] = ("json_schema",)


class JsonObject(RequestModel, tag="json_object"):
    REFUSED: ClassVar[Names] = ("json_schema",)


class AnyJsonObject(RequestModel, tag="json_object"):
    """A JSON object, possibly with a schema, which is in `schema` from clients of llama.cpp, in `value` from TGI's."""

    REFUSED: ClassVar[Names] = ("json_schema",)

    schema: JsonSchemaValue | None = None
    value: JsonSchemaValue | None = None


class JsonSchema(RequestModel):
    """A JSON schema. With `strict: true`, keywords that cannot be enforced are refused. Otherwise they are dropped, and
    the response's header `X-Sluice-Not-Enforced` names them."""

    IGNORED: ClassVar[Names] = ("description",)

    schema: JsonSchemaValue
    name: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(RequestModel, tag="json_schema"):
    """A format with a JSON schema: in `json_schema`, or in llama.cpp's field `schema` or TGI's field `value`."""

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
    """TGI's format for a JSON schema."""

    value: JsonSchemaValue


class RegexFormat(RequestModel, tag="regex"):
    """TGI's format for a regular expression."""

    value: Text


class Structure(RequestModel):
    begin: Text
    schema: JsonSchemaValue
    end: str


class StructuralTagFormat(RequestModel, tag="structural_tag"):
    """Free text with tagged parts, given by `structures` and `triggers`, or by xgrammar's `format`."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[Text], Meta(min_length=1, max_length=MAX_TAGS)] | None = None
    format: dict[str, Any] | None = None


class FlatJsonSchemaFormat(JsonSchema, tag="json_schema"):
    """JsonSchemaFormat in OpenAI's Responses API."""


ResponseFormat = PlainText | AnyJsonObject | JsonSchemaFormat | JsonFormat | RegexFormat | StructuralTagFormat
ResponseFormatField = Annotated[
    ResponseFormat | None,
    doc(
        "`text`, `json_object`, or `json_schema` with the schema that the answer keeps to; also TGI's `json` and "
        "`regex` with a `value`, llama.cpp's `json_object` with a `schema`, and vLLM's `structural_tag`"
    ),
]
TextFormat = PlainText | JsonObject | FlatJsonSchemaFormat


Verbosity = Annotated[
    Literal["low", "medium", "high"] | None, doc("A variable of the chat template; no effect if the template has none")
]


class TextOptions(RequestModel):
    """The field `text` of OpenAI's Responses API."""

    format: TextFormat | None = None
    verbosity: Verbosity = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema: JsonSchemaValue


class OutputConfig(RequestModel):
    """Anthropic's field `output_config`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A request field that asks for structured output: its name, the kind of its grammar, and the grammar's source.

    strict: whether the keywords of a JSON schema that cannot be enforced are refused, and not dropped
    compact: whether JSON has no white space between its parts
    """

    param: str
    kind: Kind
    value: Any = None
    strict: bool = False
    compact: bool = False


def openai(request: OpenAIFields, form: ResponseFormat | TextFormat | None, param: str) -> list[StructuredOutput]:
    """Returns every structured output that a request asks for. param: the name of the field that holds `form`"""
    return [*(of_format(form, param) if form is not None else ()), *_guided(request)]


def of_format(form: ResponseFormat | TextFormat | None, param: str) -> Iterator[StructuredOutput]:
    """Yields the structured output that a format asks for. param: the name of the field that holds `form`"""
    match form:
        case AnyJsonObject(schema=None, value=None) | JsonObject():
            yield StructuredOutput(param, "json_object")
        case AnyJsonObject(schema=schema, value=value):
            name, named = ("value", value) if schema is None else ("schema", schema)
            yield StructuredOutput(f"{param}.{name}", "json", named)
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema, strict=strict)):
            yield StructuredOutput(f"{param}.json_schema.schema", "json", schema, bool(strict))
        case JsonSchemaFormat(value=JsonSchema(schema=schema, strict=strict)):
            yield StructuredOutput(f"{param}.value.schema", "json", schema, bool(strict))
        case JsonSchemaFormat(schema=schema):
            yield StructuredOutput(f"{param}.schema", "json", schema)
        case JsonFormat(value=schema):
            yield StructuredOutput(f"{param}.value", "json", schema)
        case RegexFormat(value=pattern):
            yield StructuredOutput(f"{param}.value", "regex", pattern)
        case StructuralTagFormat():
            yield StructuredOutput(param, "structural_tag", msgspec.to_builtins(form))
        case FlatJsonSchemaFormat(schema=schema, strict=strict):
            yield StructuredOutput(f"{param}.schema", "json", schema, bool(strict))


def _guided(request: OpenAIFields) -> Iterator[StructuredOutput]:
    for name, kind in FIELDS:
        if (value := getattr(request, name, None)) is not None:
            yield StructuredOutput(name, kind, value)
    if (outputs := request.structured_outputs) is None:
        return
    for kind in GUIDED:
        if (value := getattr(outputs, kind)) is not None:
            yield StructuredOutput(f"structured_outputs.{kind}", kind, value, compact=outputs.disable_any_whitespace)
    if outputs.json_object:
        param = "structured_outputs.json_object"
        yield StructuredOutput(param, "json_object", compact=outputs.disable_any_whitespace)


def anthropic(config: OutputConfig | None, older: OutputFormat | None) -> list[StructuredOutput]:
    """Returns the structured outputs of Anthropic's formats. older: the format under its name of the beta"""
    forms = {"output_config.format.schema": config and config.format, "output_format.schema": older}
    return [StructuredOutput(param, "json", form.schema) for param, form in forms.items() if form]
