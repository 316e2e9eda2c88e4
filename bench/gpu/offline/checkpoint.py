"""Writes a checkpoint folder with a real model's shapes and few layers. Its weights are a sparse file."""

import json
from pathlib import Path

from bench.gpu.setup.checkpoint import tokenizer
from bench.gpu.shapes import CONFIGS

LAYERS = {"gemma-3-1b": 6}  # enough layers to have windows and full attention; other models get two layers


def checkpoint(folder: Path, model: str) -> Path:
    """Writes a bfloat16 checkpoint. Its tokenizer has few words, because no text is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**CONFIGS[model], "num_hidden_layers": LAYERS.get(model, 2), "eos_token_id": 2}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).state_dict()
    header, end = {}, 0
    for name, tensor in made.items():
        if name != "lm_head.weight" or not config["tie_word_embeddings"]:
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            end += tensor.nbytes
    words = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer(2048).save(str(folder / "tokenizer.json"))
    return folder
