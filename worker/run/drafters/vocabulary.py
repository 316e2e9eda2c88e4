"""Compares the vocabularies of two checkpoints. Drafts are ids, so each id must stand for the same token in both."""

import json
from pathlib import Path
from typing import Any


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether the tokenizer.json files of two folders have the same tokens under the same ids. Merges may differ."""
    return _tokens(one) == _tokens(other)


def _tokens(folder: Path) -> dict[int, str]:
    told: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = told["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {id: token for token, id in vocabulary.items()}
    else:  # Unigram tokenizers have a list of (token, score) pairs
        tokens = {id: token for id, (token, _) in enumerate(vocabulary)}
    return tokens | {added["id"]: added["content"] for added in told.get("added_tokens", ())}
