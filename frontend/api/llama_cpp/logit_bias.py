"""Logit biases in llama.cpp's forms: by token id or by text, in pairs or in an object. `false` forbids a token.

A bias may be any number. Beyond `MOST_BIAS`, every bias has the same effect: it decides alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from frontend.model_context import ModelContext, check_ids
from frontend.schema.base import FieldError
from frontend.schema.request_fields import doc

FIELD = "logit_bias"
MAX_ENTRIES = 4096
MOST_BIAS = 1e30  # the worker adds biases in float32, and penalties multiply the sum by up to 1e6

_value: dict[str, Any] = {"anyOf": [{"type": "number"}, {"enum": [False]}]}
_token: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}
SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_ENTRIES,
            "items": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "prefixItems": [_token, _value],
                "items": {"anyOf": [*_token["anyOf"], *_value["anyOf"]]},
            },
        },
        {"type": "object", "maxProperties": MAX_ENTRIES, "additionalProperties": _value},
    ]
}
Pair = list[str | float | bool]
LogitBias = Annotated[
    list[Pair] | dict[str, float | bool] | None,
    Meta(extra_json_schema=SCHEMA),
    doc("Pairs, or an object, of a token id or a text and what is added to the logits of its tokens; false: never"),
]


class Biases(NamedTuple):
    added: Mapping[int, float]
    forbidden: Sequence[int]


def check(biases: list[Pair] | dict[str, float | bool] | None) -> None:
    """Raises FieldError for an entry that is not a pair of a token and a bias."""
    if biases is not None and len(biases) > MAX_ENTRIES:
        raise FieldError(FIELD, f"may have at most {MAX_ENTRIES} entries")
    for entry in biases.items() if isinstance(biases, dict) else biases or ():
        if len(entry) != 2 or not _is_token(entry[0]):
            raise FieldError(FIELD, "must have pairs of a token id or a text, and a bias")
        bias = entry[1]
        if bias is not False and type(bias) not in (int, float):
            raise FieldError(FIELD, "must have numbers as biases, or false")


def _is_token(token: Any) -> bool:
    return isinstance(token, str) or (type(token) in (int, float) and token >= 0 and token == int(token))


async def by_token(biases: list[Pair] | dict[str, float | bool] | None, context: ModelContext) -> Biases:
    """Returns the biases by token id. A text stands for all its tokens, and later entries replace earlier ones.

    Raises Unprocessable for ids outside the vocabulary.
    """
    entries = list(_entries(biases))
    texts = [token for token, _ in entries if isinstance(token, str)]
    encoded = iter(await context.tokenizer.encode_batch(texts, False) if texts else [])
    found: dict[int, float | bool] = {}
    for token, bias in entries:
        found |= dict.fromkeys(next(encoded) if isinstance(token, str) else [token], bias)
    check_ids(FIELD, list(found), context.vocab_size)
    return Biases(
        {id: float(max(-MOST_BIAS, min(MOST_BIAS, bias))) for id, bias in found.items() if bias is not False},
        [id for id, bias in found.items() if bias is False],
    )


def _entries(biases: list[Pair] | dict[str, float | bool] | None) -> Iterator[tuple[str | int, float | bool]]:
    """Yields tokens with their biases. In an object, a name that is a number is a token id, and any other name is a
    text."""
    if isinstance(biases, dict):
        for name, bias in biases.items():
            yield (int(name) if name.isascii() and name.isdigit() else name), bias
        return
    for token, value in biases or ():
        yield (token if isinstance(token, str) else int(token)), value  # type: ignore[misc]
