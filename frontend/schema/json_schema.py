"""JSON Schemas of request types, for the API description and the tables in docs/."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect as nodes

from frontend.errors import SluiceError
from frontend.schema.base import RequestModel, alternatives, bare, fields_of, type_info
from frontend.schema.decoding import reader, refuse_unknown
from frontend.schema.request_fields import GenerationFields
from shared.messages import Sampling

Schema = Mapping[str, Any]  # JSON Schema, 2020-12
SAMPLING_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Sampling) if not field.required}


def request_schema(kind: type[RequestModel]) -> Schema:
    """Returns the schema of a whole body, without the fields that accept only null (REFUSED)."""
    return _object(type_info(kind))


def refused_fields(kind: type[RequestModel]) -> list[str]:
    return [name for name, field in fields_of(kind).items() if _refused(field)]


def ignored_fields(kind: type[RequestModel]) -> list[str]:
    return [name for name, field in fields_of(kind).items() if isinstance(bare(field.type), nodes.AnyType)]


def _refused(field: nodes.Field) -> bool:
    return isinstance(field.type, nodes.NoneType)


def schema(node: nodes.Type) -> Schema:
    """Returns the schema of a value, without null."""
    extra: dict[str, Any] = {}
    while isinstance(node, nodes.Metadata):
        extra = {**(node.extra_json_schema or {}), **extra}
        node = node.type
    extra.pop("description", None)
    options = [_one(one) if one is node else schema(one) for one in alternatives(node)]
    if "anyOf" in extra:
        return extra
    return {**(options[0] if len(options) == 1 else {"anyOf": options}), **extra}


def _one(node: nodes.Type) -> Schema:
    match node:
        case nodes.IntType(ge=low, le=high):
            return {"type": "integer", **_bounds(minimum=low, maximum=high)}
        case nodes.FloatType(ge=low, le=high):
            return {"type": "number", **_bounds(minimum=low, maximum=high)}
        case nodes.StrType(min_length=least, max_length=most, pattern=pattern):
            return {"type": "string", **_bounds(minLength=least, maxLength=most, pattern=pattern)}
        case nodes.BoolType():
            return {"type": "boolean"}
        case nodes.LiteralType(values=values):
            return {"type": "string", "enum": list(values)}
        case nodes.ListType(item_type=item, min_length=least, max_length=most):
            return {"type": "array", "items": schema(item), **_bounds(minItems=least, maxItems=most)}
        case nodes.DictType(key_type=nodes.StrType(), value_type=value, min_length=least, max_length=most):
            null = any(isinstance(one, nodes.NoneType) for one in getattr(bare(value), "types", ()))
            each = _nullable(schema(value)) if null else schema(value)
            entries = {} if isinstance(bare(value), nodes.AnyType) else {"additionalProperties": each}
            return {"type": "object", **entries, **_bounds(minProperties=least, maxProperties=most)}
        case nodes.DictType(value_type=value):
            keys = {"pattern": "^[0-9]{1,10}$"}
            return {"type": "object", "propertyNames": keys, "additionalProperties": schema(value)}
        case nodes.StructType():
            return _object_or_text(node)
    return {}


def _object_or_text(node: nodes.StructType) -> Schema:
    kind: Any = node.cls
    if not kind.FROM_TEXT:
        return _object(node)
    return {"anyOf": [_object(node), schema(fields_of(kind)[kind.FROM_TEXT].type)]}


def _bounds(**bounds: Any) -> dict[str, Any]:
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _object(node: nodes.StructType) -> Schema:
    kind: Any = node.cls
    properties: dict[str, Any] = {}
    untagged = kind.DEFAULT_TYPE or kind.KNOWN_BY
    if node.tag_field:
        tag: Schema = {"type": "string", "enum": [node.tag]}
        properties[node.tag_field] = _nullable(tag) if untagged else tag
    fields = {name: field for name, field in fields_of(kind).items() if not _refused(field)}
    properties |= {name: _property(kind, field) for name, field in fields.items()}
    properties |= {name: _nullable({"enum": list(values)}) for name, values in kind.ONLY.items()}
    tags = [node.tag_field] if node.tag_field and not untagged else []
    shape = {
        "type": "object",
        "properties": properties,
        "required": tags + [name for name, field in fields.items() if field.required],
        "additionalProperties": False,
    }
    return {"allOf": [shape, *kind.SCHEMA]} if kind.SCHEMA else shape


def _nullable(shape: Schema) -> Schema:
    return {"anyOf": [shape, {"type": "null"}]} if shape else shape


def _property(kind: type[RequestModel], field: nodes.Field) -> Schema:
    shape = schema(field.type)
    about = {"description": text} if (text := description(field)) else {}
    if field.required or not shape:
        return {**about, **shape}
    default = _default(kind, field)
    return {**about, **_nullable(shape), **({} if default is None else {"default": default})}


def description(field: nodes.Field) -> str:
    """Returns a field's description; empty if the field has none."""
    for node in (field.type, *alternatives(field.type)):
        if isinstance(node, nodes.Metadata) and "description" in (node.extra_json_schema or {}):
            return str((node.extra_json_schema or {})["description"])
    return ""


def _default(kind: type[RequestModel], field: nodes.Field) -> Any:
    """Returns the default that null stands for; None if a client could not send this value (such as a `top_k` of 0)."""
    value = field.default
    if value is None and issubclass(kind, GenerationFields):
        value = SAMPLING_DEFAULTS.get(field.name)
    try:
        return None if value is None else reader(field.type)(value, field.name, refuse_unknown)
    except SluiceError:
        return None
