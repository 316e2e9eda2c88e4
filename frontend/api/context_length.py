"""Whether a prompt fits the model's context, and the words of the refusal if it does not.

Clients find out from these words that a conversation is too long, and by how much, so the words are OpenAI's.
Anthropic's format writes its own from the same numbers (anthropic/envelope.py).
"""

from frontend.api.model_context import ModelContext
from frontend.errors import ContextLengthExceeded


def check_length(param: str, prompt: int, output: int, context: ModelContext) -> None:
    """Raises ContextLengthExceeded if a prompt of `prompt` tokens cannot be answered with `output` more.

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
    """Raises ContextLengthExceeded for a text that has too many characters for any of its tokenizations to fit.

    Such a text is refused before it is tokenized, which takes seconds for megabytes. A context whose `max_seq_len` is 0
    has no limit.
    """
    most = context.max_seq_len
    least = (
        context.tokenizer.fewest_tokens(text, most) if 0 < most < len(text) else 0
    )  # a token has a character at least
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
