"""Writes a random checkpoint of bench/checkpoints.py as a bf16 GGUF file: `python gguf_file.py FOLDER OUT.gguf`.

Metadata and tensor layout are as llama.cpp's converter writes them. tests/gguf_files.py also uses this module.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.peers.gguf_layout import stored_columns, stored_numbers, stored_rows
from bench.peers.gguf_values import hyperparameters, rotary_factors

ARCHITECTURES = {  # transformers' model_type → GGUF's architecture, where they differ
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "ministral3": "mistral3", "olmo3": "olmo2",
    "glm4_moe": "glm4moe", "qwen3_next": "qwen3next", "cohere": "command-r", "hunyuan_v1_dense": "hunyuan-dense",
    "granitemoehybrid": "granitehybrid", "granitemoeshared": "granitemoe", "ernie4_5_moe": "ernie4_5-moe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe",
}  # fmt: skip
RENAMED = {  # end of a tensor's name → the end that the converter puts in its place before it looks the name up
    ".dt_bias": ".dt_proj.bias", ".layer_scalar": ".layer_scalar.weight", ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale", ".e_score_correction_bias": ".e_score_correction.bias",
}  # fmt: skip

Config = Mapping[str, Any]


def main(folder: Path, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(out), architecture(config))
    write_metadata(writer, folder, config, gguf.LlamaFileType.MOSTLY_BF16)
    names = name_map(config)
    if config["model_type"] == "gemma4_text":
        writer.add_tensor("rope_freqs.weight", rotary_factors(config))
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.startswith(("lm_head", "mtp.")):  # omits a tied head and an MTP head
            _tensor(writer, stored_name(names, name), name, weight, config)
    finish(writer)


def architecture(config: Config) -> str:
    return ARCHITECTURES.get(config["model_type"], str(config["model_type"]))


def name_map(config: Config) -> gguf.TensorNameMap:
    """Returns the gguf library's map from Hugging Face tensor names to GGUF tensor names."""
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture(config))
    return gguf.get_tensor_name_map(arch, config["num_hidden_layers"])


def stored_name(names: gguf.TensorNameMap, name: str) -> str:
    """Returns a tensor's name in GGUF. name: the tensor's Hugging Face name."""
    for end, other in RENAMED.items():
        name = f"{name.removesuffix(end)}{other}" if name.endswith(end) else name
    found = names.get_name(name, (".weight", ".bias", ".scale"))
    assert found is not None, name
    return str(found)


def write_metadata(writer: gguf.GGUFWriter, folder: Path, config: Config, file_type: gguf.LlamaFileType) -> None:
    """Writes everything except tensors: hyperparameters from `config`, and the folder's tokenizer."""
    writer.add_name("random")
    hyperparameters(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    add_metadata(writer, vocabulary(tokenizer, config["vocab_size"]))


def vocabulary(tokenizer: Config, size: int, *, pre: str = "gpt-2") -> dict[str, Any]:
    """Returns the GGUF metadata of a byte-level BPE tokenizer. tokenizer: the content of tokenizer.json.

    size: number of rows of the embedding. The last rows may have no token.
    """
    texts, types = [f"[PAD{i}]" for i in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for text, token in tokenizer["model"]["vocab"].items():
        texts[token], types[token] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        texts[added["id"]], types[added["id"]] = added["content"], int(kind)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    values = {
        "tokens": texts, "token_type": types, "bos_token_id": 0, "eos_token_id": 2, "padding_token_id": 0,
        "add_bos_token": "SpecialToken" in json.dumps(tokenizer["post_processor"]), "model": "gpt2", "pre": pre,
        "merges": merges,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def add_metadata(writer: gguf.GGUFWriter, metadata: Config) -> None:
    add = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    for key, value in metadata.items():
        add[type(value)](key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor(writer: gguf.GGUFWriter, stored: str, name: str, weight: Tensor, config: Config) -> None:
    """Writes matrices in bfloat16, all other tensors in float32."""
    if weight.dim() != 2:
        writer.add_tensor(stored, stored_numbers(name, weight.float().numpy(), config))
        return
    bits = stored_columns(name, weight.contiguous().view(torch.uint16).numpy(), config)
    rows = stored_rows(name, bits, config).view(np.uint8)
    writer.add_tensor(stored, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
