"""Writes tiny GGUF files of every family, as llama.cpp's converter does, and the same model for transformers.

The reference is a Hugging Face checkpoint in float32 whose weights are those of the file, dequantized by `gguf`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.checkpoints import EOS, VOCAB, WINDOW, byte_fallback_tokenizer, byte_level_tokenizer
from tests.gguf_blocks import dequantized, random_rows

PLAIN = ("F32", "F16", "BF16")
HEAD_DIM = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 1024,
    "initializer_range": 0.1, "eos_token_id": EOS, "bos_token_id": 0, "pad_token_id": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip
WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1 + i / 20 for i in range(24)],
    "long_factor": [4.0] * 24, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75,
}  # fmt: skip


def _phi3() -> PreTrainedModel:
    part = {"partial_rotary_factor": 0.75}
    return Phi3ForCausalLM(
        Phi3Config(
            **WITHOUT_HEAD_DIM, **part, sliding_window=WINDOW, original_max_position_embeddings=512,
            rope_parameters=LONG_ROPE,
        )
    )  # fmt: skip


def _gemma3() -> PreTrainedModel:
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7}, sliding_window=WINDOW, layer_types=types, rope_parameters=GEMMA_ROPE,
            query_pre_attn_scalar=HEAD_DIM,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A family and its architecture in GGUF. paired: whether the converter pairs the rows of queries and keys."""

    architecture: str
    model: Callable[[], PreTrainedModel]
    tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_level_tokenizer
    paired: bool = False
    norm_shift: float = 0.0


KINDS = {
    "llama": Kind("llama", lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)), paired=True),
    "llama-biased": Kind(
        "llama", lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)), paired=True
    ),
    "mistral": Kind("llama", lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)), paired=True),
    "qwen2": Kind("qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**WITHOUT_HEAD_DIM, rope_parameters=YARN_ROPE))),
    "qwen3": Kind("qwen3", lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))),
    "gemma3": Kind("gemma3", _gemma3, byte_fallback_tokenizer, norm_shift=1.0),
    "phi3": Kind("phi3", _phi3),
    "smollm3": Kind(
        "smollm3",
        lambda: SmolLM3ForCausalLM(
            SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, no_rope_layer_interval=4, tie_word_embeddings=False)
        ),
        paired=True,
    ),
}

Types = Callable[[str], str]  # GGUF name of a matrix → its type
Metadata = Mapping[str, Any]


def mixed(name: str) -> str:
    """Returns the types of a Q4_K_M file: values and down projections in Q6_K, beside Q4_K."""
    return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.")) else "Q4_K"


@dataclass(frozen=True)
class Written:
    file: Path
    reference: Path  # a Hugging Face checkpoint


def write(
    kind: str, folder: Path, types: str | Types = "Q8_0", *, seed: int = 0, more: Metadata = MappingProxyType({})
) -> Written:
    """Writes folder/model.gguf and the reference.

    types: of all matrices, or by name. more: metadata that is added, or replaces that of the tokenizer.
    """
    torch.manual_seed(seed)
    row, reference = KINDS[kind], folder / "reference"
    row.model().save_pretrained(reference)
    row.tokenizer().save_pretrained(reference)
    config = json.loads((reference / "config.json").read_text())
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), row.architecture)
    hyperparameters(writer, config, row.architecture)
    tokenizer = json.loads((reference / "tokenizer.json").read_text())
    add_metadata(writer, vocabulary(tokenizer, VOCAB, scores=scores_of(tokenizer)) | dict(more))
    template = json.loads((reference / "tokenizer_config.json").read_text()).get("chat_template")
    writer.add_chat_template(template or (reference / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(_architecture(row.architecture), config["num_hidden_layers"])
    rng, weights = np.random.default_rng(seed), load_file(reference / "model.safetensors")
    for name, weight in weights.items():
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        type = (types if isinstance(types, str) else types(stored)) if weight.dim() > 1 else "F32"
        if "norm" in name:
            weight += torch.from_numpy(rng.normal(0, 0.1, weight.shape).astype(np.float32))
        if "post_" in name and row.norm_shift:  # else the scaled embedding outweighs the layers (tests/checkpoints.py)
            weight += 8.0
        if name.endswith("bias"):
            weight.copy_(torch.from_numpy(rng.normal(0, 0.1, weight.shape).astype(np.float32)))
        weights[name] = _add(writer, stored, weight, type, rng, _heads(name, config) if row.paired else 0, row)
    save_file(weights, reference / "model.safetensors", {"format": "pt"})
    finish(writer)
    return Written(folder / "model.gguf", reference)


def _add(
    writer: gguf.GGUFWriter, name: str, weight: torch.Tensor, type: str, rng: np.random.Generator, heads: int, row: Kind
) -> torch.Tensor:
    """Adds a tensor. Returns the weight as the file has it, in the layout of Hugging Face."""
    numbers = weight.numpy()
    if type == "F32":
        shift = row.norm_shift if name.endswith("norm.weight") else 0.0
        writer.add_tensor(name, paired(numbers + np.float32(shift), heads))
        return weight
    kind = gguf.GGMLQuantizationType[type]
    rows = gguf.quants.quantize(numbers, kind) if type in PLAIN else random_rows(*numbers.shape, type, rng, 0.08)
    writer.add_tensor(name, paired(rows, heads), raw_dtype=kind)
    return torch.from_numpy(dequantized(rows, type))


def paired(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Returns the rows of queries or keys as llama.cpp rotates them: the halves of each head become pairs."""
    if not heads:
        return rows
    parts = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(rows.shape))


def _heads(name: str, config: Metadata) -> int:
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def hyperparameters(writer: gguf.GGUFWriter, config: Metadata, architecture: str) -> None:
    rope, head_dim = config["rope_parameters"], config.get("head_dim") or HEAD_DIM
    full = rope.get("full_attention", rope)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    if config.get("sliding_window") and architecture != "qwen2":
        writer.add_sliding_window(config["sliding_window"])
    _rope(writer, full, head_dim, config)


def _rope(writer: gguf.GGUFWriter, rope: Metadata, head_dim: int, config: Metadata) -> None:
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "longrope":
            original = rope["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))


def llama3_factors(rope: Metadata, head_dim: int) -> npt.NDArray[np.float32]:
    """Returns by how much Llama 3's scaling divides each frequency."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def vocabulary(
    tokenizer: Metadata, size: int, *, pre: str = "gpt-2", scores: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the metadata of a tokenizer.json: byte-level BPE, or with `scores` SentencePiece's BPE.

    size: of the embedding, whose last rows may have no token.
    """
    kinds, prefix = gguf.TokenType, "tokenizer.ggml."
    texts, types = [f"[PAD{i}]" for i in range(size)], [kinds.UNUSED] * size
    for text, token in tokenizer["model"]["vocab"].items():
        byte = scores is not None and text.startswith("<0x")
        texts[token], types[token] = text, kinds.BYTE if byte else kinds.NORMAL
    for added in tokenizer["added_tokens"]:
        text, token = added["content"], added["id"]
        texts[token] = text if scores is None or added["special"] else text.replace("▁", " ")
        types[token] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    metadata = {
        prefix + "tokens": texts, prefix + "token_type": list(map(int, types)), prefix + "bos_token_id": 0,
        prefix + "eos_token_id": EOS, prefix + "padding_token_id": 0,
        prefix + "add_bos_token": "SpecialToken" in json.dumps(tokenizer["post_processor"]),
    }  # fmt: skip
    if scores is None:
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
        return metadata | {prefix + "model": "gpt2", prefix + "pre": pre, prefix + "merges": merges}
    found = [-1000.0 if type in (kinds.CONTROL, kinds.USER_DEFINED) else scores.get(text, -2000.0)
             for text, type in zip(texts, types, strict=True)]  # fmt: skip
    unknown = tokenizer["model"]["vocab"][tokenizer["model"]["unk_token"]]
    return metadata | {
        prefix + "model": "llama", prefix + "scores": found, prefix + "unknown_token_id": unknown,
        prefix + "add_space_prefix": "Prepend" in json.dumps(tokenizer["normalizer"]),
    }  # fmt: skip


def scores_of(tokenizer: Metadata) -> dict[str, float] | None:
    """Returns scores that give the order of merges of a tokenizer with tokens for bytes; None for another tokenizer."""
    if not tokenizer["model"]["byte_fallback"]:
        return None
    return {"".join(pair): -float(rank) for rank, pair in enumerate(tokenizer["model"]["merges"])}


def add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
