"""Tiny random checkpoints with the templates and tags of families that reason and call tools."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from tests.checkpoints import VOCAB, byte_level_tokenizer, save
from tests.templates import GLM, HARMONY, LLAMA3, MISTRAL, PLAIN, QWEN3, QWEN35

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARKS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
MOST = 4096  # longest sequence: a conversation with tools has a token for each byte


def qwen3(folder: Path) -> Path:
    """Qwen3: its tags are tokens, but not special tokens, so the text of an answer shows them."""
    return _speaking("qwen3", folder, QWEN3, [AddedToken(tag, normalized=False, special=False) for tag in TAGS])


def qwen35(folder: Path) -> Path:
    """Qwen3 with the template of Qwen3.5, whose calls have parameters between tags."""
    return _speaking("qwen3", folder, QWEN35, [AddedToken(tag, normalized=False, special=False) for tag in TAGS])


def glm(folder: Path) -> Path:
    """GLM: its tags are special tokens, which the text of an answer leaves out."""
    tags = (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    return _speaking("glm4", folder, GLM, [AddedToken(tag, normalized=False, special=True) for tag in tags])


def plain(folder: Path) -> Path:
    """A model whose chat template does not support tools."""
    return _speaking("qwen3", folder, PLAIN, [AddedToken(tag, normalized=False, special=False) for tag in TAGS])


def llama3(folder: Path) -> Path:
    return _speaking("llama", folder, LLAMA3, [AddedToken("<|python_tag|>", normalized=False, special=True)])


def mistral(folder: Path) -> Path:
    return _speaking("mistral", folder, MISTRAL, [AddedToken("[TOOL_CALLS]", normalized=False, special=True)])


def gpt_oss(folder: Path) -> Path:
    """Writes a gpt-oss whose weights make it end a message after about two tokens, where the grammar allows it."""
    made = _speaking("gpt-oss", folder, HARMONY, [AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    ids = json.loads((made / "tokenizer.json").read_text())["added_tokens"]
    end, *ends = [next(one["id"] for one in ids if one["content"] == text) for text in MARKS[:3]]
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    weights = load_file(made / "model.safetensors")
    weights["lm_head.weight"][end] *= 20
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


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
