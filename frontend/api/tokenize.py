"""Turns text or chat messages into token ids and back, without a worker."""

from functools import partial
from typing import Annotated

from frontend.api.chat.own_template import with_template
from frontend.api.chat.tool_fields import shown
from frontend.api.context_length import check_counted
from frontend.api.model_context import ModelContext, check_ids, check_model
from frontend.api.openai.chat_input import TokenizeRequest, chat_prompt
from frontend.api.requests.encoding import made
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import ModelName, TextIds, doc
from frontend.api.requests.response_types import Prompt, TokenizerInfo, Tokens
from frontend.errors import BadRequest, Unprocessable


class DetokenizeRequest(RequestModel):
    tokens: Annotated[TextIds, doc("Token ids")]
    model: ModelName = None


async def tokenize(request: TokenizeRequest, context: ModelContext) -> Tokens:
    """Encodes `prompt`, by default with the tokenizer's special tokens, or else `messages`, rendered as a chat."""
    check_model(request.model, context)
    prompt, special = request.prompt, request.add_special_tokens
    if (prompt is None) == (request.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt")
    if prompt is None:
        if special:
            raise Unprocessable(
                "`add_special_tokens`: a chat template writes its own", param="add_special_tokens", code="out_of_range"
            )
        context = with_template(context.unlimited, request.chat_template)
        ids = (await chat_prompt(request, await shown(request.tools, request.tool_choice), context)).ids
    else:
        check_counted("prompt", len(prompt), context)
        ids = await context.tokenizer.encode(prompt, special is not False)
    return Tokens(tokens=[*ids], count=len(ids), max_model_len=context.max_seq_len or None)


async def detokenize(request: DetokenizeRequest, context: ModelContext) -> Prompt:
    check_model(request.model, context)
    check_ids("tokens", request.tokens, context.vocab_size)
    check_counted("tokens", len(request.tokens), context)
    decode = partial(context.tokenizer.decode, request.tokens, skip_special=False)
    text = await made(decode, len(request.tokens))
    return Prompt(prompt=text, content=text)


def info(context: ModelContext) -> TokenizerInfo:
    """Returns facts for evaluation harnesses that do not have the tokenizer. The same route exists in vLLM."""
    tokenizer = context.tokenizer
    return TokenizerInfo(
        bos_token=tokenizer.named_tokens.get("bos_token"),
        eos_token=tokenizer.named_tokens.get("eos_token"),
        pad_token=tokenizer.named_tokens.get("pad_token"),
        unk_token=tokenizer.named_tokens.get("unk_token"),
        chat_template=tokenizer.templates.get("default"),
        vocab_size=context.vocab_size,
    )
