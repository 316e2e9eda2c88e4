"""Writes a random checkpoint of bench/checkpoints.py as a bf16 GGUF file: `python gguf_file.py FOLDER OUT.gguf`.

Knows the Llama and Qwen3 shapes only.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def main(folder: Path, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(out), config["model_type"])
    write_metadata(writer, folder, config, gguf.LlamaFileType.MOSTLY_BF16)
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.startswith("lm_head"):
            _tensor(writer, name.removesuffix(".weight"), weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: Any, folder: Path, config: dict[str, Any], file_type: gguf.LlamaFileType) -> None:
    """Writes all that is no tensor: hyperparameters from `config`, and the folder's tokenizer."""
    _hyperparameters(writer, config)
    writer.add_file_type(file_type)
    _vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])


def _hyperparameters(writer: Any, config: dict[str, Any]) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("random")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _vocabulary(writer: Any, tokenizer: dict[str, Any], size: int) -> None:
    """Writes the tokenizer, with unused tokens up to `size`."""
    ids = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    unused = range(len(ids), size)
    types = [kinds.CONTROL if id in special else kinds.NORMAL for _, id in ids]
    writer.add_token_list([*(text for text, _ in ids), *(f"<unused{id}>" for id in unused)])
    writer.add_token_types([*types, *(kinds.UNUSED for _ in unused)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in _merges(tokenizer)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _merges(tokenizer: dict[str, Any]) -> list[Any]:
    return list(tokenizer["model"]["merges"])


def _tensor(writer: Any, name: str, weight: Tensor, config: dict[str, Any]) -> None:
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    to = f"blk.{found[1]}.{LAYER[found[2]]}.weight" if found else f"{WHOLE[name]}.weight"
    if config["model_type"] == "llama" and found and found[2] in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if found[2].endswith("q_proj") else "num_key_value_heads"]
        weight = _pairs(weight, heads)
    if weight.dim() == 1:
        writer.add_tensor(to, weight.float().numpy())
        return
    raw = weight.contiguous().view(torch.uint16).numpy().view(np.uint8)
    writer.add_tensor(to, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Converts rotary halves, as Hugging Face stores them, to the interleaved pairs of GGUF's llama."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
