"""Generates the tables of docs/api.md: routes, fields of requests, and errors."""

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from frontend import errors
from frontend.api.anthropic import messages
from frontend.api.openai import completions
from frontend.api.receipts import Receipt
from frontend.api.sglang.types import SamplingParams
from frontend.routes.openapi import ERRORS, document
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.base import MOST, SMALLEST, RequestModel
from frontend.schema.json_schema import Schema, ignored_fields, refused_fields, request_schema
from frontend.server import http_protocol
from frontend.workers.pool import rejection_error
from shared import messages as m

FRONTEND = Path(__file__).parents[2] / "frontend"
API_FORMATS = {
    "completions": "CompletionRequest",
    "chat": "ChatCompletionRequest",
    "responses": "ResponseRequest",
    "messages": "MessageRequest",
}
T = TypeVar("T")


def routes() -> str:
    paths = document()["paths"]
    rows = [
        [f"`{method.upper()} {path}`", what["summary"], "" if what.get("security") == [] else "yes"]
        for path, item in paths.items()
        for method, what in item.items()
        if method in ("get", "post", "delete")
    ]
    return table(["route", "", "asks for a key"], rows)


def fields() -> str:
    """Lists the request fields of all API formats; a field that differs between formats has a row for each variant."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, shape, value in effective(request):
            rows.setdefault((name, words(shape), value, shape["description"]), []).append(api_format)
    names = list(dict.fromkeys(name for name, *_ in rows))
    return table(
        ["field", "value", "default", *API_FORMATS, ""],
        [
            [f"`{name}`", kind, value, *("✓" if api_format in formats else "" for api_format in API_FORMATS), meaning]
            for (name, kind, value, meaning), formats in sorted(rows.items(), key=lambda row: names.index(row[0][0]))
        ],
    )


def effective(request: str) -> Iterator[tuple[str, Schema, str]]:
    """Yields the fields that have an effect: name, schema, default."""
    return _effective(REQUESTS[request])


def _effective(kind: type[RequestModel]) -> Iterator[tuple[str, Schema, str]]:
    body = request_schema(kind)
    for name, shape in body["properties"].items():
        if name not in kind.ONLY and name not in ignored_fields(kind):
            yield name, shape, "required" if name in body["required"] else default(shape)


def ignored() -> str:
    return _grouped(lambda request: dict.fromkeys(ignored_fields(REQUESTS[request]), "anything"))


def only() -> str:
    """Lists the fields of unsupported features, and the values of these fields that are accepted nevertheless."""
    return _grouped(lambda request: {name: words({"enum": values}) for name, values in REQUESTS[request].ONLY.items()})


def refused() -> str:
    return _grouped(lambda request: dict.fromkeys(refused_fields(REQUESTS[request]), "`null`"))


def _grouped(values: Callable[[str], Mapping[str, str]]) -> str:
    """Makes a table with one row for all fields that have the same value in the same API formats.

    values: returns the value of each field of a request.
    """
    formats: dict[tuple[str, str], list[str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, value in values(request).items():
            formats.setdefault((name, value), []).append(api_format)
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, value), has in formats.items():
        rows.setdefault((value, ", ".join(has)), []).append(f"`{name}`")
    return table(["fields", "value", "in"], [[", ".join(names), value, has] for (value, has), names in rows.items()])


def nested() -> str:
    found: dict[tuple[str, str, str], list[str]] = {}
    for api_format, request in API_FORMATS.items():
        for name, shape, _ in effective(request):
            for path, (kind, required) in merged(inner(name, shape)).items():
                found.setdefault((path, kind, "yes" if required else ""), []).append(api_format)
    rows = [[f"`{path}`", kind, need, ", ".join(has)] for (path, kind, need), has in sorted(found.items())]
    return table(["field", "value", "needed in its object", "in"], rows)


def small() -> str:
    """Lists the body fields of the routes that only count or convert tokens."""
    parts = {
        "/v1/responses/input_tokens": "InputRequest",
        "/v1/messages/count_tokens": "CountRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    return table(["route", "field", "value", "default"], [row[:4] for row in _by_route(parts)])


def pooling() -> str:
    """Lists the body fields of the routes that answer with vectors or scores."""
    parts = {
        "/v1/embeddings": "EmbeddingRequest", "/v1/score": "ScoreRequest", "/v1/rerank": "RerankRequest",
        "/v1/classify": "ClassifyRequest", "/pooling": "PoolingRequest", "/embed": "TeiEmbedRequest",
        "/similarity": "TeiSimilarityRequest", "/predict": "TeiPredictRequest", "/v2/embed": "CohereEmbedRequest",
        "/generative_scoring": "GenerativeScoringRequest", "/v1/systemone": "SystemOneRequest",
        "/v1/decisions": "DecisionRequest",
    }  # fmt: skip
    return table(["route", "field", "value", "default", ""], _by_route(parts))


def logprobs() -> str:
    """Lists the body fields of the route that scores tokens."""
    rows = [row[1:] for row in _by_route({"/v1/logprobs": "LogprobsRequest"})]
    return table(["field", "value", "default", ""], rows)


def llama() -> str:
    """Lists the body fields of llama.cpp's routes. Fields that /completion and /infill share are listed once."""
    own = _by_route({"/completion": "LlamaCppCompletionRequest"})
    shared = {row[1] for row in own}
    more = {"/infill": "InfillRequest", "/embedding": "LlamaCppEmbeddingRequest"}
    rows = own + [row for row in _by_route(more) if row[0] != "`/infill`" or row[1] not in shared - {"`prompt`"}]
    return table(["route", "field", "value", "default", ""], rows)


def sglang() -> str:
    """Lists the body fields of SGLang's route, and those of its `sampling_params`."""
    own = [row[1:] for row in _by_route({"/generate": "SglangGenerateRequest"})]
    params = [
        [f"`sampling_params.{name}`", words(shape), value, shape["description"]]
        for name, shape, value in _effective(SamplingParams)
    ]
    return table(["field", "value", "default", ""], own + params)


def verify() -> str:
    """Lists the body fields of the route that checks receipts, and the fields of a receipt."""
    rows = [row[1:] for row in _by_route({"/v1/receipts/verify": "VerifyRequest"})]
    return table(["field", "value", "default", ""], rows)


def receipt() -> str:
    """Lists the fields of a receipt."""
    shape = request_schema(Receipt)["properties"]
    return table(["field", "value", ""], [[f"`{name}`", words(one), one["description"]] for name, one in shape.items()])


def _by_route(requests: Mapping[str, str]) -> list[list[str]]:
    return [
        [f"`{route}`", f"`{name}`", words(shape), value, shape["description"]]
        for route, request in requests.items()
        for name, shape, value in effective(request)
    ]


def failures() -> str:
    kinds: dict[int, tuple[str, str]] = {one.status: (one.kind, "") for one in early()}
    for error in _subclasses(errors.SluiceError):
        openai, anthropic = completions.error(error(""), ""), messages.error(error(""), "")
        kinds[error.status] = _type(openai), _type(anthropic)
    when = {**ERRORS, 404: "No such route, or no such name in it", 405: "The route has another method"}
    rows = [
        [str(status), when[status], *(f"`{kind}`" if kind else "as OpenAI's" for kind in kinds[status])]
        for status in sorted(when)
    ]
    return table(["status", "when", "OpenAI's `type`", "Anthropic's `type`"], rows)


def early() -> list[http_protocol.EarlyRefusal]:
    """Returns the errors that are raised before the route is known. All of them have OpenAI's format."""
    return [one for one in vars(http_protocol).values() if isinstance(one, http_protocol.EarlyRefusal)]


def codes() -> str:
    """Lists every `code` that an error can have, by HTTP status."""
    found: dict[int, set[str]] = {}
    tagged = ((errors.Unprocessable.status, one.UNKNOWN_TYPE) for one in _subclasses(RequestModel))
    for status, code in (*_written(), *tagged, *((one.status, one.code) for one in early()), *_workers()):
        found.setdefault(status, set()).add(code)
    rows = [[str(status), ", ".join(f"`{code}`" for code in sorted(found[status]))] for status in sorted(found)]
    return table(["status", "`code`"], rows)


def _written() -> Iterator[tuple[int, str]]:
    """Yields the status and code of every error that the frontend's source constructs with a code."""
    classes = {error.__name__: error.status for error in _subclasses(errors.SluiceError)}
    # _fail of frontend/workers/pool.py raises Overloaded for requests that are not admitted
    classes["_fail"] = errors.Overloaded.status
    for file in sorted(FRONTEND.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            for word in node.keywords if isinstance(node, ast.Call) and name in classes else ():
                if word.arg == "code" and isinstance(word.value, ast.Constant):
                    yield classes[name], str(word.value.value)


def _workers() -> Iterator[tuple[int, str]]:
    for reason in m.Refusal:
        error = rejection_error(m.Rejected(0, reason, ""))
        yield error.status, error.code or ""


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _type(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["type"])


API_TABLES: Mapping[str, Callable[[], str]] = {
    "routes": routes, "fields": fields, "ignored": ignored, "only": only, "refused": refused, "nested": nested,
    "small": small, "pooling": pooling, "logprobs": logprobs, "verify": verify, "receipt": receipt,
    "llama": llama, "sglang": sglang,
    "failures": failures, "codes": codes,
}  # fmt: skip


# Describes JSON Schemas in a few words: "integer, from 1 to 128", "array of (string), at most 16".
#
# Knows only the keywords that occur in the schemas of requests. Any other keyword raises KeyError, so that no
# description leaves something out.

BOUNDLESS = 1e9  # a bound above this is not mentioned


def words(shape: Schema) -> str:
    """Describes the values that a schema allows, apart from null; an object is described only as "object"."""
    kinds = list(dict.fromkeys(_words(one) for one in _alternatives(shape)))
    return " or ".join(kinds) or "anything"


def _alternatives(schema: Schema) -> Iterator[Schema]:
    """Yields the alternatives of a schema, recursively. Only the first part of an `allOf` counts."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _alternatives(one)
    elif "allOf" in schema:
        yield from _alternatives(schema["allOf"][0])
    elif schema.get("type") != "null" and set(schema) - {"description"} != {"maxItems"}:
        yield schema


def _words(schema: Schema) -> str:
    if "enum" in schema:
        return " / ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = schema.get("type", "anything")
    return _of(kind, schema)


def _of(kind: str, schema: Schema) -> str:
    match kind:
        case "integer" | "number":
            return kind + _bounds(schema)
        case "array":
            most = schema.get("maxItems", MOST)
            return f"array of ({words(schema['items'])})" + (f", at most {most}" if most < 10_000 else "")
        case "object" if type(schema.get("additionalProperties")) is dict:
            return f"object of ({words(schema['additionalProperties'])})"
        case "string" if "maxLength" in schema:
            return f"string, at most {schema['maxLength']} characters"
        case _:
            return {"string": "string", "boolean": "boolean", "object": "object", "anything": "anything"}[kind]


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum", -MOST), schema.get("maximum", MOST)
    least = "above 0" if low == SMALLEST else f"from {low:g}" if abs(low) < BOUNDLESS else ""
    most = f"to {high:g}" if abs(high) < BOUNDLESS else ""
    return f", {least} {most}".rstrip() if least or most else ""


def inner(name: str, schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Yields every field of the objects in a schema: path (`messages[].role`), schema, and whether it is required."""
    for one in _alternatives(schema):
        if one.get("type") == "array":
            yield from inner(f"{name}[]", one["items"])
        for field, shape in one.get("properties", {}).items() if "additionalProperties" in one else ():
            yield f"{name}.{field}", shape, field in one.get("required", ())
            yield from inner(f"{name}.{field}", shape)


def merged(found: Iterator[tuple[str, Schema, bool]]) -> Mapping[str, tuple[str, bool]]:
    """Returns for each path the description over all alternatives, and whether the field is always required."""
    rows: dict[str, tuple[list[str], bool]] = {}
    for name, shape, required in found:
        known, always = rows.setdefault(name, ([], True))
        kind = words(shape)
        rows[name] = known + [kind] * (kind not in known), always and required
    return {name: (" / ".join(known), always) for name, (known, always) in rows.items()}


def default(shape: Schema) -> str:
    """Returns the default as JSON; empty if the schema states none. A schema states neither null nor a default that no
    client can send."""
    return f"`{json.dumps(shape['default'])}`" if "default" in shape else ""


# Markdown for the generated tables.


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def sentence(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
