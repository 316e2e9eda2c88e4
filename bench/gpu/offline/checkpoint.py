"""Writes a checkpoint folder with a real model's shapes and few layers. Its weights are a sparse file."""

import json
from math import prod
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
    shapes = {
        name: list(tensor.shape)
        for name, tensor in made.items()
        if name != "lm_head.weight" or not config["tie_word_embeddings"]
    }
    _write(folder / "model.safetensors", shapes)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer(2048).save(str(folder / "tokenizer.json"))
    return folder


def add_mtp_head(folder: Path) -> None:
    """Adds the tensors of an MTP head to a checkpoint of checkpoint()."""
    shapes = _shapes(folder / "model.safetensors")
    hidden = shapes["model.norm.weight"]
    head = {"mtp.fc.weight": [*hidden, 2 * hidden[0]]}
    head |= {f"mtp.{name}.weight": hidden for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
    head |= {f"mtp.{name.removeprefix('model.')}": shape for name, shape in layer.items()}
    _write(folder / "model.safetensors", shapes | head)


def eagle_head(folder: Path, served: Path) -> Path:
    """Writes an EAGLE-3 head for a Llama of checkpoint(). It knows half of the tokens."""
    config, shapes = json.loads((served / "config.json").read_text()), _shapes(served / "model.safetensors")
    (hidden,), known = shapes["model.norm.weight"], config["vocab_size"] // 2
    layer = {
        name.replace("model.layers.0.", "midlayer."): [shape[0], 2 * hidden] if "self_attn" in name else shape
        for name, shape in shapes.items()
        if name.startswith("model.layers.0.") and "o_proj" not in name
    }
    layer |= {"midlayer.self_attn.o_proj.weight": shapes["model.layers.0.self_attn.o_proj.weight"]}
    layer |= {"midlayer.hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    layer |= {"fc.weight": [hidden, 2 * hidden], "lm_head.weight": [known, hidden]}
    folder.mkdir()
    _write(folder / "model.safetensors", {**layer, "d2t": [known]})
    more = {"num_hidden_layers": 1, "draft_vocab_size": known, "eagle_aux_hidden_state_layer_ids": [1, 0]}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: one["shape"] for name, one in header.items()}


def _write(file: Path, shapes: dict[str, list[int]]) -> None:
    """Writes tensors of zeros as a sparse file: in bfloat16, and the map of a head's tokens in int64."""
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype, size = ("I64", 8) if name == "d2t" else ("BF16", 2)
        begin, end = end, end + size * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(words).to_bytes(8, "little") + words)
        stream.truncate(8 + len(words) + end)
