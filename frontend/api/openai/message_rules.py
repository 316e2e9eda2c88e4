"""Rules for a message of OpenAI's chat beyond the types of its fields, for the API description."""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]  # JSON Schema

# An assistant's message may have one of these fields instead of `content`.
INSTEAD_OF_CONTENT = ("reasoning_content", "reasoning", "refusal")


def _having(name: str, schema: Schema) -> Schema:
    return {"required": [name], "properties": {name: schema}}


_FROM_ASSISTANT: Schema = {"properties": {"role": {"const": "assistant"}}}
_SPOKEN = [_having(name, {"type": "string", "minLength": 1}) for name in INSTEAD_OF_CONTENT]
_CALLED_OR_SPOKEN: Schema = {"anyOf": [_having("tool_calls", {"type": "array", "minItems": 1}), *_SPOKEN]}
_THOUGHT = {"type": "object", **_having("type", {"enum": ["thinking", "reasoning"]})}
_NO_THOUGHTS: Schema = {"properties": {"content": {"not": {"type": "array", "contains": _THOUGHT}}}}

RULES: Sequence[Schema] = (
    {"anyOf": [_having("content", {"not": {"type": "null"}}), {"allOf": [_FROM_ASSISTANT, _CALLED_OR_SPOKEN]}]},
    {"anyOf": [_FROM_ASSISTANT, {"properties": {"tool_calls": {"maxItems": 0}}}]},
    {"anyOf": [_FROM_ASSISTANT, _NO_THOUGHTS]},
)
