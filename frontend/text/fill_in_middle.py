"""Fill-in-the-middle prompts: the text before the middle, the text after it, and the model's special tokens (marks).

Each family of models has its own marks, so the vocabulary shows which layout a model was trained with.
"""

from collections.abc import Sequence
from itertools import chain

from frontend.errors import Unprocessable
from frontend.text.tokenizer import Tokenizer

PREFIX, SUFFIX = "prefix", "suffix"
# Each row: the parts of a prompt in order. A model has this layout if its vocabulary has all marks of the row.
LAYOUTS: Sequence[tuple[str, ...]] = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),  # Code Llama
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)  # fmt: skip


Layout = tuple[str, ...]
# Each row: the mark before a repository's name, and the mark before each file's name. A model needs both marks.
REPOSITORY: Sequence[tuple[str, str]] = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen2.5-Coder
    ("<repo_name>", "<file_sep>"),  # StarCoder2
    ("<reponame>", "<filename>"),  # StarCoder, Granite Code
)
# Tokens that begin something else or end a file, so that they end the middle, too. Not all of them end other outputs of
# the model: an instruct model ends its turn with another token.
ENDS = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", *chain.from_iterable(REPOSITORY), "<|file_separator|>", "<|endoftext|>",
    "<|end_of_text|>", "<｜end▁of▁sentence｜>", "▁<EOT>", "<EOT>", "<|EOT|>",
)  # fmt: skip


def layout_of(tokenizer: Tokenizer) -> Layout | None:
    """Returns the layout of the model's prompts; None if it was not trained to fill in the middle."""
    return next((one for one in LAYOUTS if all(part in (PREFIX, SUFFIX) or _id(part, tokenizer) for part in one)), None)


def filled(layout: Layout, before: list[int], after: list[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the prompt that asks for the middle between two texts, without a BOS token."""
    parts = {PREFIX: before, SUFFIX: after}
    return [*chain.from_iterable(parts[part] if part in parts else _id(part, tokenizer) for part in layout)]


def repository_marks(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Returns the ids of the marks before a repository's name and before a file's; None if there are no such marks."""
    pairs = ((_id(name, tokenizer), _id(file, tokenizer)) for name, file in REPOSITORY)
    return next(((name[0], file[0]) for name, file in pairs if name and file), None)


def ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of tokens that end the middle, in addition to the tokens that end any output."""
    return tuple([id for mark in ENDS for id in _id(mark, tokenizer)])


def ends_of(prompts: Sequence[list[int]], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns `ends` if one of the prompts, as token ids, asks for a middle; else nothing.

    Such a prompt has all marks of the model's layout, whoever has put them there.
    """
    marks, ending = tokenizer.once(_marks_and_ends)
    return ending if marks and any(all(mark in ids for mark in marks) for ids in prompts) else ()


def _marks_and_ends(tokenizer: Tokenizer) -> tuple[list[int], tuple[int, ...]]:
    """Returns the marks of the model's layout, and `ends`; no marks if the model has no layout."""
    parts = layout_of(tokenizer) or ()
    return [id for part in parts if part not in (PREFIX, SUFFIX) for id in _id(part, tokenizer)], ends(tokenizer)


async def with_suffix(prompts: Sequence[list[int]], suffix: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns for each of `prompts` the prompt that asks for the text between it and `suffix`.

    prompts: token ids; ids that the tokenizer puts before every text (BOS) stay at the beginning

    Raises Unprocessable for a model that was not trained to fill in the middle.
    """
    layout = layout_of(tokenizer)
    if layout is None:
        raise Unprocessable(
            "`suffix` is not supported by this model: its tokenizer has no tokens for filling in the middle",
            param="suffix", code="unsupported_field",
        )  # fmt: skip
    after = await tokenizer.encode(suffix, add_special_tokens=False)
    (lead,) = await tokenizer.encode_batch([""])
    done = []
    for ids in prompts:
        begin = lead if lead and ids[: len(lead)] == lead else []
        done.append([*begin, *filled(layout, ids[len(begin) :], after, tokenizer)])
    return done


def _id(mark: str, tokenizer: Tokenizer) -> list[int]:
    """Returns a list with the id of a mark; an empty list if the mark is not a token."""
    id = tokenizer.id_of_mark(mark)
    return [] if id is None else [id]
