"""Text or chat messages to ids and back, without the worker."""

from typing import Annotated, Any

from msgspec import Meta

from frontend.api.common import ModelContext, check_ids, check_model
from frontend.api.openai.chat_input import TokenizeRequest, chat_prompt
from frontend.api.request_model import RequestModel
from frontend.api.request_types import Count, ModelName, doc
from frontend.api.tools import functions
from frontend.errors import BadRequest, Unprocessable


class DetokenizeRequest(RequestModel):
    tokens: Annotated[list[Count], Meta(max_length=1 << 24), doc("Token ids")]
    model: ModelName = None


async def tokenize(request: TokenizeRequest, context: ModelContext) -> dict[str, Any]:
    """Adds the tokenizer's special tokens to `prompt`, unless told not to; `messages` become what chat sends."""
    check_model(request.model, context)
    prompt, special = request.prompt, request.add_special_tokens
    if (prompt is None) == (request.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if prompt is None:
        if special:
            raise Unprocessable(
                "`add_special_tokens`: a chat template writes its own", param="add_special_tokens", code="out_of_range"
            )
        ids = (await chat_prompt(request, functions(request.tools), context)).ids
    else:
        ids = await context.tokenizer.encode(prompt, special is not False) if prompt else []
    return {"tokens": ids, "count": len(ids), "max_model_len": context.max_seq_len or None}


async def detokenize(request: DetokenizeRequest, context: ModelContext) -> dict[str, Any]:
    check_model(request.model, context)
    check_ids("tokens", request.tokens, context.vocab_size)
    return {"prompt": context.tokenizer.decode(request.tokens, skip_special=False)}


def info(context: ModelContext) -> dict[str, Any]:
    """Facts about the tokenizer for evaluation harnesses that do not have it; the same as vLLM's route of that name."""
    known = context.tokenizer
    named = {name: known.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {**named, "chat_template": known.templates.get("default"), "vocab_size": context.vocab_size}
