"""Shows parsers the special tokens that they need. Detokenized text omits special tokens, so stand-ins replace them.

A stand-in is a lone surrogate, to which no sequence of bytes decodes, so no model can spell one letter by letter.
"""

from collections.abc import Mapping

START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = map(chr, range(0xDC81, 0xDC88))

HARMONY: Mapping[str, str] = {
    "<|start|>": START,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
TOOL_CALLS, CALL_ID, ARGS, THINK, THOUGHT = map(chr, range(0xDC91, 0xDC96))

MISTRAL_ARGS: Mapping[str, str] = {
    "[TOOL_CALLS]": TOOL_CALLS,
    "[CALL_ID]": CALL_ID,
    "[ARGS]": ARGS,
    "[THINK]": THINK,
    "[/THINK]": THOUGHT,
}
BLANK = "\udc80"  # replaces hidden characters; it stands for no token, and no stop string contains it
_SPELLINGS = {ord(mark): spelling for each in (HARMONY, MISTRAL_ARGS) for spelling, mark in each.items()}


def spelled(text: str) -> str:
    """Returns `text` with its stand-ins written out as the special tokens' spellings."""
    return text.translate(_SPELLINGS)
