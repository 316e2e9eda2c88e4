"""llama.cpp's /apply-template: the text of a chat's prompt, without tokens that the tokenizer adds by itself.

/chat/completions/input_tokens counts the tokens of that prompt.
"""

from frontend.api.chat.own_template import with_template
from frontend.api.chat.tool_fields import shown
from frontend.api.llama_cpp import response_types as types
from frontend.api.model_context import ModelContext, check_model
from frontend.api.openai.chat_input import TemplateRequest, chat_prompt, rendered_chat
from frontend.api.openai.responses_types import InputTokens


async def apply_template(request: TemplateRequest, context: ModelContext) -> types.LlamaCppPrompt:
    """Renders the prompt of messages as a chat does.

    /completion turns this text into the same tokens, unless a message spells a special token. The chat treats that
    spelling as plain text, and /completion does not.
    """
    check_model(request.model, context)
    context = with_template(context.unlimited, request.chat_template)
    text = (await rendered_chat(request, await shown(request.tools, request.tool_choice), context)).text
    bos = context.tokenizer.named_tokens.get("bos_token") or ""
    (lead,) = await context.tokenizer.encode_batch([""])
    added = bool(bos) and context.tokenizer.decode(lead, skip_special=False).startswith(bos)
    return types.LlamaCppPrompt(prompt=text.removeprefix(bos) if added else text)


async def count_tokens(request: TemplateRequest, context: ModelContext) -> InputTokens:
    """Returns the number of input tokens that a chat with this body would have."""
    check_model(request.model, context)
    context = with_template(context.unlimited, request.chat_template)
    prompt = await chat_prompt(request, await shown(request.tools, request.tool_choice), context)
    return InputTokens(input_tokens=len(prompt.ids))
