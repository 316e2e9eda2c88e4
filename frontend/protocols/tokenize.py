"""Text or chat messages to ids and back, without the worker."""

from typing import Any

from frontend.errors import BadRequest
from frontend.protocols.common import Context, check_ids, check_model
from frontend.protocols.fields import Field, Table, boolean, exactly, integer, list_of, read, some_text

TOKENIZE: Table = {
    "model": Field(some_text),
    "prompt": Field(exactly(str)),
    "messages": Field(list_of(exactly(dict), 10_000)),
    "add_special_tokens": Field(boolean),
    "add_generation_prompt": Field(boolean, True),
    "chat_template_kwargs": Field(exactly(dict), {}),
}

DETOKENIZE: Table = {
    "model": Field(some_text),
    "tokens": Field(list_of(integer(0), 1 << 24), required=True),
}


async def tokenize(body: dict[str, Any], context: Context) -> dict[str, Any]:
    """`prompt` gets the tokenizer's special tokens unless told otherwise; a template writes its own."""
    values = read(TOKENIZE, body)
    check_model(values["model"] or context.model, context)
    prompt, messages, special = values["prompt"], values["messages"], values["add_special_tokens"]
    if (prompt is None) == (messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if messages is not None:
        prompt = context.template.render(messages, values["add_generation_prompt"], **values["chat_template_kwargs"])
    if special is None:
        special = messages is None
    ids = await context.tokenizer.encode(prompt, special) if prompt else []
    return {"tokens": ids, "count": len(ids), "max_model_len": context.max_seq_len}


async def detokenize(body: dict[str, Any], context: Context) -> dict[str, Any]:
    values = read(DETOKENIZE, body)
    check_model(values["model"] or context.model, context)
    check_ids("tokens", values["tokens"], context.vocab_size)
    return {"prompt": context.tokenizer.decode(values["tokens"], skip_special=False)}
