"""Tiny random checkpoints that speak as families do which think and call: their templates and their tags."""

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.checkpoints import VOCAB, byte_level_tokenizer, save
from tests.templates import LLAMA3, MISTRAL, QWEN3

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MOST = 4096  # tokens of a conversation with tools, byte by byte


def qwen3(folder: Path) -> Path:
    """Its tags are tokens of their own and no special ones: an answer shows them."""
    return _speaking("qwen3", folder, QWEN3, [AddedToken(tag, normalized=False, special=False) for tag in TAGS])


def llama3(folder: Path) -> Path:
    return _speaking("llama", folder, LLAMA3, [AddedToken("<|python_tag|>", normalized=False, special=True)])


def mistral(folder: Path) -> Path:
    return _speaking("mistral", folder, MISTRAL, [AddedToken("[TOOL_CALLS]", normalized=False, special=True)])


def _speaking(kind: str, folder: Path, template: str, tags: list[AddedToken]) -> Path:
    save(kind, folder)
    tokenizer = byte_level_tokenizer(VOCAB - len(tags))
    tokenizer.add_tokens([tag for tag in tags if not tag.special])
    tokenizer.add_tokens([tag for tag in tags if tag.special], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MOST}))
    return folder
