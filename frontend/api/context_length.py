"""Checks that a prompt fits the model's context, and words the refusal if it does not.

The message is worded like OpenAI's, because clients parse it to learn that a conversation is too long, and by how much.
Anthropic's format writes its own message from the same numbers (anthropic/envelope.py).
"""

from frontend.api.model_context import ModelContext
from frontend.errors import ContextLengthExceeded


def check_length(param: str, prompt: int, output: int, context: ModelContext) -> None:
    """Raises ContextLengthExceeded if the context cannot hold `prompt` prompt tokens and `output` new tokens.

    param: the request field that holds the prompt
    """
    most = context.max_seq_len
    if prompt > most:
        raise _exceeded(
            f"{prompt} tokens in the {param}. Please reduce the length of the {param}.", param, prompt, 0, most
        )
    if prompt + output > most:
        raise _exceeded(
            f"{prompt + output} tokens ({prompt} in the {param}, {output} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param, prompt, output, most,
        )  # fmt: skip


def check_characters(param: str, text: str, context: ModelContext) -> None:
    """Raises ContextLengthExceeded for a text with so many characters that no tokenization of it can fit.

    This check comes before tokenization, which takes seconds for a text of megabytes. There is no limit if
    `max_seq_len` is 0.
    """
    most = context.max_seq_len
    least = (
        context.tokenizer.fewest_tokens(text, most) if 0 < most < len(text) else 0
    )  # a text of `most` characters or fewer always fits, because each token has at least one character
    if least > most:
        raise _exceeded(
            f"at least {least} tokens in the {param}. Please reduce the length of the {param}.",
            param, least, 0, most, at_least=True,
        )  # fmt: skip


def _exceeded(
    requested: str, param: str, prompt: int, output: int, limit: int, at_least: bool = False
) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, you requested {requested}",
        param=param, code="context_length_exceeded",
        prompt=prompt, output=output, limit=limit, at_least=at_least,
    )  # fmt: skip
