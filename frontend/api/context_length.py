"""Checks that a prompt fits the model's context, and words the refusal if it does not.

The message is worded like OpenAI's, because clients parse it to learn that a conversation is too long, and by how much.
Anthropic's format writes its own message from the same numbers (anthropic/envelope.py).
"""

from frontend.api.model_context import ModelContext
from frontend.errors import ContextLengthExceeded, Unprocessable

MOST_COUNTED = 1 << 20  # characters of a text that no context limits; the tokenizer needs 0.2 KB for each
CHARACTERS_A_TOKEN = 8  # a context of T tokens holds a text of this many characters per token, unless it is unusual


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


def check_counted(param: str, length: int, context: ModelContext) -> None:
    """Raises Unprocessable for a text that is only counted or tokenized, if it is so long that this would take too much
    memory: 0.2 KB a character.

    length: of the text in characters, or of ids
    """
    most = max(MOST_COUNTED, CHARACTERS_A_TOKEN * context.longest)
    if length > most:
        raise Unprocessable(
            f"`{param}` is {length} long; at most {most} characters or ids are counted or tokenized at once",
            param=param, code="out_of_range",
        )  # fmt: skip


def check_characters(param: str, text: str, context: ModelContext) -> None:
    """Raises ContextLengthExceeded for a text with so many characters that no tokenization of it can fit.

    This check comes before tokenization, which takes seconds for a text of megabytes. If `max_seq_len` is 0, the limit
    is that of `check_counted`.
    """
    most = context.max_seq_len
    if not most:
        check_counted(param, len(text), context)
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
