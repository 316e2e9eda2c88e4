"""The base of all response types, and the responses of the routes that generate no text.

A response is a Struct, and `schemas` makes its JSON Schema for /openapi.json. An optional field that is UNSET is
omitted. Streams use the same types, but encode the constant parts of a chunk only once.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec import inspect as nodes

from frontend.schema.base import ResponseModel
from shared.checkpoint import TaskName

Capability = Literal["completion", "embedding", "insert", "thinking", "tools", "vision"]
Size = Annotated[int, Meta(ge=0)]


class Timings(ResponseModel):
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    cached_tokens: Size
    draft_tokens: Size
    accepted_draft_tokens: Size
    inter_token_p50_ms: float
    inter_token_p99_ms: float


class Accepted(ResponseModel):
    """The response of llama.cpp's routes that change a setting."""

    success: Literal[True] = True


class ModelStatus(ResponseModel):
    """Whether workers of this server have the model in memory, with llama.cpp's field `value`."""

    value: Annotated[
        Literal["loaded", "loading", "unloaded", "failed"],
        Meta(description="unloaded: no worker is there; failed: the workers or the tokenizer cannot serve it"),
    ]
    reason: Annotated[str | None, Meta(description="Why no request can be served now; else null")] = None
    on_demand: Annotated[bool | UnsetType, Meta(description="Whether it is loaded when a request asks for it")] = UNSET
    progress: Annotated[
        float | UnsetType, Meta(description="While its files are fetched: the part of the present file that is here")
    ] = UNSET


class Model(ResponseModel):
    """The served model: first OpenAI's fields, then Anthropic's. Lengths are null until a worker has reported them."""

    id: str
    object: Literal["model"] = "model"
    created: Size
    owned_by: str = "sluice"
    root: str
    parent: Annotated[str | None, Meta(description="The base model of an adapter")] = None
    max_model_len: Size | None
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: Size | None
    lifecycle: Annotated[Literal["active"], Meta(description="Anthropic's; no model is retired here")] = "active"
    fingerprint: Annotated[str | None, Meta(description="Equal on servers that give equal answers")]
    status: ModelStatus
    capabilities: Annotated[
        list[Capability] | None,
        Meta(description="In Ollama's words; null while the tokenizer is loading, and for Anthropic's SDK"),
    ] = None
    recommended_sampling: Annotated[
        dict[str, float] | None,
        Meta(description="By the model's authors; `--sampling-defaults` says whether requests get it"),
    ] = None


class LlamaCppModel(ResponseModel):
    """A model as llama.cpp's clients expect it. They call the ability to read images "multimodal"."""

    name: str
    model: str
    capabilities: list[Literal["completion", "embedding", "multimodal"]]


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Model]
    models: Annotated[list[LlamaCppModel], Meta(description="The same for llama.cpp's clients")]
    allows_pull: Annotated[bool | UnsetType, Meta(description="Whether `/api/pull` fetches models here")] = UNSET
    has_more: bool = False
    first_id: str
    last_id: str


class TokenPiece(ResponseModel):
    id: Size
    piece: Annotated[str | list[Size], Meta(description="A text, or the bytes of a part of a character")]


class Tokens(ResponseModel):
    tokens: Annotated[
        list[Size | TokenPiece | list[Size]],
        Meta(description="Ids; with `with_pieces`, objects; of several texts, arrays of ids"),
    ]
    count: Size | list[Size]
    max_model_len: Size | None
    token_strs: Annotated[
        list[str] | UnsetType, Meta(description="With `return_token_strs`: the text of each token, for people")
    ] = UNSET


class Prompt(ResponseModel):
    prompt: Annotated[str | list[str], Meta(description="The text; an array of several")]
    content: Annotated[str | list[str], Meta(description="The same by llama.cpp's name")]
    text: Annotated[str | list[str], Meta(description="The same by SGLang's name")]


class TokenizerInfo(ResponseModel):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: Size


class Health(ResponseModel):
    status: Literal["ok"] = "ok"
    model_loaded: bool


class Load(ResponseModel):
    server_load: Annotated[Size, Meta(description="Requests that this frontend has in work")]


class Version(ResponseModel):
    version: str


class PrefixCacheReset(ResponseModel):
    workers: Size


class Ready(ResponseModel):
    status: Literal["ready"] = "ready"
    task: TaskName
    chat: Annotated[bool, Meta(description="Whether the model has a chat template")]


class NotReady(ResponseModel):
    status: Literal["not_ready"] = "not_ready"
    reason: str
    progress: float


def schemas(types: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON Schemas (2020-12) of response types, and of the types within them, by component name.

    types: by name, a Struct or a union of Structs
    """
    shapes, components = msgspec.json.schema_components(types.values(), ref_template="#/components/schemas/{name}")
    for struct in _structs(types.values()):
        _require_all(struct, components[struct.__name__])
    named = {name: shape for name, shape in zip(types, shapes, strict=True) if "$ref" not in shape}
    return {**components, **named}


def _structs(types: Iterable[Any]) -> set[type[msgspec.Struct]]:
    found: set[type[msgspec.Struct]] = set()

    def visit(node: Any) -> None:
        match node:
            case nodes.StructType(cls=cls, fields=fields):
                if cls not in found:
                    found.add(cls)
                    for field in fields:
                        visit(field.type)
            case nodes.UnionType(types=parts):
                for part in parts:
                    visit(part)
            case nodes.ListType(item_type=item):
                visit(item)
            case nodes.DictType(value_type=value):
                visit(value)

    for kind in types:
        visit(nodes.type_info(kind))
    return found


def _require_all(struct: type[msgspec.Struct], schema: dict[str, Any]) -> None:
    """Marks as required all fields that a response always contains. If the type writes its defaults, these include
    fields with defaults."""
    left_out = struct.__struct_config__.omit_defaults
    schema["required"] = [
        field.encode_name
        for field in msgspec.structs.fields(struct)
        if field.default is not UNSET and (field.required or not left_out)
    ] + ([struct.__struct_config__.tag_field] if struct.__struct_config__.tag_field else [])
    for shape in schema["properties"].values():
        shape.pop("default", None)
