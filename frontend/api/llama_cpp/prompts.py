"""The prompts of llama.cpp's routes: a text, token ids, a mixture of both, or several of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from frontend.api.context_length import check_characters
from frontend.api.model_context import ModelContext, check_ids
from frontend.api.openai.completions_input import MAX_PROMPTS
from frontend.api.requests.request_model import EXACT, FieldError, RequestModel
from frontend.errors import BadRequest

SHAPES = "a string, an array of strings and token ids, or an array of either"


class PromptObject(RequestModel):
    ONLY: ClassVar = {"multimodal_data": ([],)}

    prompt_string: str


_Token = Annotated[int, EXACT]
Mixed = list[str | _Token]
One = str | PromptObject | Annotated[Mixed, Meta(min_length=1)]
AnyPrompt = (
    str
    | PromptObject
    | Annotated[list[str | _Token | PromptObject | Annotated[Mixed, Meta(min_length=1)]], Meta(min_length=1)]
)

_piece: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
_mixed: dict[str, Any] = {"type": "array", "items": _piece, "minItems": 1}
_object: dict[str, Any] = {
    "type": "object",
    "properties": {
        "prompt_string": {"type": "string"},
        "multimodal_data": {"anyOf": [{"enum": [[]]}, {"type": "null"}]},
    },
    "required": ["prompt_string"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _object,
        {**_mixed, "contains": {"type": "integer"}},
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, _object, _mixed]},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str  # the prompt as text, in which special tokens are spelled out


def several(prompt: AnyPrompt, param: str) -> list[One]:
    """Returns the prompts of a request as a list. An array that contains a token id is one prompt. Raises
    FieldError."""
    if not isinstance(prompt, list):
        return [prompt]
    kinds = {*map(type, prompt)}
    if int in kinds:
        if not kinds <= {int, str}:
            raise FieldError(param, f"must be {SHAPES}", BadRequest, "wrong_type")
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise FieldError(param, f"may have at most {MAX_PROMPTS} entries")
    return prompt  # type: ignore[return-value]


async def tokenized(prompts: Sequence[One], param: str, context: ModelContext) -> list[Prompt]:
    """Encodes prompts. If a prompt begins with a text, the tokenizer puts its special tokens before it.

    Raises BadRequest for a prompt without tokens, Unprocessable for ids outside the vocabulary.
    """
    pieces = [_pieces(one) for one in prompts]
    first = [one[0] for one in pieces if isinstance(one[0], str)]
    later = [piece for one in pieces for piece in one[1:] if isinstance(piece, str)]
    for text in (*first, *later):
        check_characters(param, text, context)
    encode = context.tokenizer.encode_batch
    begins, follows = iter(await encode(first)), iter(await encode(later, False))
    (lead,) = await encode([""])
    before = context.tokenizer.decode(lead, skip_special=False)
    done = []
    for one in pieces:
        ids = list(next(begins)) if isinstance(one[0], str) else [one[0]]
        for piece in one[1:]:
            ids += next(follows) if isinstance(piece, str) else [piece]
        if not ids:
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
        text = before + one[0] if len(one) == 1 and isinstance(one[0], str) else ""
        done.append(Prompt(ids, text or context.tokenizer.decode(ids, skip_special=False)))
    return done


def _pieces(prompt: One) -> Mixed:
    if isinstance(prompt, str):
        return [prompt]
    return [prompt.prompt_string] if isinstance(prompt, PromptObject) else prompt
