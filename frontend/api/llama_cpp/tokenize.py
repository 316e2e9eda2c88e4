"""/tokenize and /detokenize, which vLLM and llama.cpp both have. A body with `content` is in llama.cpp's format."""

from collections.abc import Callable
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from frontend.api import tokenize as vllm
from frontend.api.context_length import check_counted
from frontend.api.model_context import ModelContext, check_ids, check_model
from frontend.api.openai.chat_input import TokenizeRequest
from frontend.api.requests.encoding import JsonArray, in_slices
from frontend.api.requests.request_model import EXACT
from frontend.api.requests.request_types import doc
from frontend.api.requests.response_types import TokenPiece, Tokens
from frontend.errors import Unprocessable
from frontend.text.tokenizer import Tokenizer

MAX_PARTS = 4096


class AnyTokenizeRequest(TokenizeRequest):
    content: Annotated[
        str | Annotated[list[str | Annotated[int, EXACT]], Meta(max_length=MAX_PARTS)] | None,
        doc("Llama.cpp's: a text, or texts and token ids"),
    ] = None
    add_special: Annotated[bool, doc("With `content`: with the tokenizer's special tokens")] = False
    parse_special: Annotated[bool, doc("With `content`: false: spellings of special tokens are text")] = True
    with_pieces: Annotated[bool, doc("With `content`: each token as `id` and `piece`")] = False
    return_token_strs: Annotated[bool, doc("Add `token_strs`: the text of each token")] = False


async def any_tokenize(request: AnyTokenizeRequest, context: ModelContext) -> Tokens:
    """Encodes `content`. A body without `content` is handled as vLLM's."""
    if request.content is None:
        answer = await vllm.tokenize(request, context)
        ids = cast(list[int], answer.tokens)
    else:
        ids = await _content_ids(request, context)
        answer = Tokens(tokens=[*ids], count=len(ids), max_model_len=context.max_seq_len or None)
        if request.with_pieces:
            pieces: Any = await _encoded(lambda id: _piece(id, context.tokenizer), ids)
            answer.tokens = pieces
    if request.return_token_strs:
        texts: Any = await _encoded(context.tokenizer.token_text, ids)
        answer.token_strs = texts
    return answer


async def _content_ids(request: AnyTokenizeRequest, context: ModelContext) -> list[int]:
    check_model(request.model, context)
    for name in ("prompt", "messages"):
        if getattr(request, name) is not None:
            raise Unprocessable(f"`{name}` cannot go with `content`", param=name, code="conflicting_fields")
    ids = await _ids_of(request, context)
    check_ids("content", ids, context.vocab_size)
    return ids


async def _encoded(write: Callable[[int], Any], ids: list[int]) -> msgspec.Raw:
    """Returns what `write` returns for each id as an array in JSON, made in slices."""
    entries = JsonArray()
    await in_slices(ids, lambda id: entries.append(write(id)))
    return entries.raw


async def _ids_of(request: AnyTokenizeRequest, context: ModelContext) -> list[int]:
    """Encodes texts, and keeps ids as they are. The tokenizer's special tokens are added only before a leading text."""
    tokenizer = context.tokenizer
    parts = [request.content] if isinstance(request.content, str) else request.content or []
    check_counted("content", sum(len(one) if isinstance(one, str) else 1 for one in parts), context)
    encode = tokenizer.encode_batch if request.parse_special else tokenizer.encode_plain
    first, rest = parts[:1], parts[1:]
    begins = iter(await encode([one for one in first if isinstance(one, str)], request.add_special))
    follows = iter(await encode([one for one in rest if isinstance(one, str)], False))
    ids = [id for one in first for id in (next(begins) if isinstance(one, str) else [one])]
    return ids + [id for one in rest for id in (next(follows) if isinstance(one, str) else [one])]


def _piece(id: int, tokenizer: Tokenizer) -> TokenPiece:
    """Returns a token with its text, or with its bytes if they are only part of a character."""
    if id in tokenizer.special_ids:
        return TokenPiece(id=id, piece=tokenizer.token_text(id))
    raw = tokenizer.token_bytes(id)
    try:
        return TokenPiece(id=id, piece=raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=id, piece=list(raw))
