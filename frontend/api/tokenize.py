"""Text or chat messages to ids and back, without the worker."""

from typing import Any

from frontend.api.common import ModelContext, check_ids, check_model
from frontend.api.fields import Field, Table, boolean, exactly, integer, list_of, read, some_text
from frontend.api.openai.chat_input import OPENAI_CHAT, openai_prompt
from frontend.errors import BadRequest, Unprocessable

TOKENIZE: Table = {
    **OPENAI_CHAT,
    "model": Field(some_text),
    "prompt": Field(exactly(str)),
    "add_special_tokens": Field(boolean),
}

DETOKENIZE: Table = {
    "model": Field(some_text),
    "tokens": Field(list_of(integer(0), 1 << 24), required=True),
}


async def tokenize(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    """`prompt` gets the tokenizer's special tokens unless told otherwise; `messages` become what chat makes of them."""
    values = read(TOKENIZE, body)
    check_model(values["model"], context)
    prompt, special = values["prompt"], values["add_special_tokens"]
    if (prompt is None) == (values["messages"] is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if prompt is None:
        if special:
            raise Unprocessable(
                "`add_special_tokens`: a chat template writes its own", param="add_special_tokens", code="out_of_range"
            )
        ids = (await openai_prompt(values, context)).ids
    else:
        ids = await context.tokenizer.encode(prompt, special is not False) if prompt else []
    return {"tokens": ids, "count": len(ids), "max_model_len": context.max_seq_len or None}


async def detokenize(body: dict[str, Any], context: ModelContext) -> dict[str, Any]:
    values = read(DETOKENIZE, body)
    check_model(values["model"], context)
    check_ids("tokens", values["tokens"], context.vocab_size)
    return {"prompt": context.tokenizer.decode(values["tokens"], skip_special=False)}


def info(context: ModelContext) -> dict[str, Any]:
    """What evaluation harnesses want to know of a tokenizer that they do not have; as vLLM's route of that name."""
    known = context.tokenizer
    named = {name: known.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {**named, "chat_template": known.templates.get("default"), "vocab_size": context.vocab_size}
