"""Tiny checkpoints for embeddings and scores, in the layouts of published ones, and transformers' results for them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.checkpoints import KINDS, SPECIAL, build

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}


def embedder(
    folder: Path, kind: str = "qwen3-tied", pooling: str = "lasttoken", *, normalized: bool = True, default: str = ""
) -> Path:
    """Writes a checkpoint as sentence-transformers does: tensor names without prefix, no head, end tokens after texts.

    default: the name of the prompt for texts whose requests name no prompt.
    """
    build(kind).base_model.save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = KINDS[kind].tokenizer()
    end = SPECIAL[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, 0)]
    )
    tokenizer.save_pretrained(folder)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": paths[index], "type": f"sentence_transformers.models.{name}"}
            for index, name in enumerate(modules)
        ],
    )
    (folder / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{mode}": mode.partition("_")[0] == pooling for mode in MODES if mode != "mean_sqrt_len_tokens"
    }
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **modes, "include_prompt": True})
    _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": default or None})
    return folder


def reranker(folder: Path, kind: str = "qwen3-tied") -> Path:
    """Writes a language model with the tokens `yes` and `no`, like Qwen3-Reranker."""
    build(kind).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = KINDS[kind].tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    for token, word in zip(state["added_tokens"][-2:], ("yes", "no"), strict=True):
        token["content"] = word
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)),
        eos_token=SPECIAL[2],  # type: ignore[attr-defined]
    )
    tokenizer.save_pretrained(folder)
    return folder


def classifier(folder: Path, kind: str = "qwen3-tied") -> Path:
    """Writes a model with a classification head of one label."""
    source = folder.with_name(folder.name + "-source")
    build(kind).save_pretrained(source)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    KINDS[kind].tokenizer().save_pretrained(folder)
    return folder


def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    """Returns the hidden states of transformers after the final norm, [T, H] float32."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return states


def tokens(folder: Path, *text: str) -> list[int]:
    """Returns the ids of a text, or of a pair."""
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(*text)["input_ids"]
    return ids


def pooled(states: torch.Tensor, pooling: str, *, dimensions: int = 0, normalized: bool = True) -> torch.Tensor:
    """Pools hidden states as the modules of sentence-transformers do."""
    vector = {"lasttoken": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling][: dimensions or None]
    return torch.nn.functional.normalize(vector, dim=0) if normalized else vector


def next_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def class_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = -1  # no token is padding, so the score is always that of the last token
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
