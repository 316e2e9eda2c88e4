"""Prompts of models that were trained to fill in the middle: the text before it, the text after it, and marks.

A model's marks are tokens of its vocabulary, so the vocabulary shows its layout.
"""

from collections.abc import Sequence
from itertools import chain

from frontend.errors import Unprocessable
from frontend.text.tokenizer import Tokenizer

PREFIX, SUFFIX = "prefix", "suffix"
# What a prompt has, in order: marks, and the two texts. A tokenizer has the layout if it has all the marks.
LAYOUTS: Sequence[tuple[str, ...]] = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),  # Code Llama
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)  # fmt: skip


async def with_suffix(prompts: Sequence[list[int]], suffix: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns prompts that ask for what stands between each of `prompts` and `suffix`.

    prompts: ids; those that the tokenizer puts before every text stay at the beginning

    Raises Unprocessable for a model that was not trained to fill in the middle.
    """
    layout = next((one for one in LAYOUTS if _has_marks(one, tokenizer)), None)
    if layout is None:
        raise Unprocessable(
            "`suffix` is not supported by this model: its tokenizer has no tokens for filling in the middle",
            param="suffix", code="unsupported_field",
        )  # fmt: skip
    after = await tokenizer.encode(suffix, add_special_tokens=False)
    (lead,) = await tokenizer.encode_batch([""])
    filled = []
    for ids in prompts:
        begin = lead if lead and ids[: len(lead)] == lead else []
        parts = {PREFIX: ids[len(begin) :], SUFFIX: after}
        filled.append([*begin, *chain.from_iterable(parts.get(part) or _id(part, tokenizer) for part in layout)])
    return filled


def _has_marks(layout: Sequence[str], tokenizer: Tokenizer) -> bool:
    return all(part in (PREFIX, SUFFIX) or _id(part, tokenizer) for part in layout)


def _id(mark: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the id of a mark in a list; an empty list for what is no token, and for the two texts."""
    return [] if mark in (PREFIX, SUFFIX) else list(tokenizer.ids_of({mark: mark}))
