"""Writes tiny GGUF files of every family, as llama.cpp's converter does, and the same model for transformers.

The reference is a Hugging Face checkpoint in float32 whose weights are those of the file, dequantized by `gguf`.
"""

import json
import re
from collections import defaultdict
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

from bench.peers import gguf_file
from bench.peers.gguf_file import add_metadata, finish, name_map, stored_name
from bench.peers.gguf_layout import original_columns, stored_columns, stored_numbers, stored_rows
from bench.peers.gguf_values import hyperparameters, rotary_factors
from tests.checkpoints import VOCAB
from tests.gguf_blocks import dequantized, random_rows
from tests.gguf_kinds import HEAD_DIM, KINDS

PLAIN = ("F32", "F16", "BF16")
WHOLE = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")  # weights that llama.cpp's converter keeps in float32
Types = Callable[[str], str]  # GGUF name of a matrix → its type
Metadata = Mapping[str, Any]


def mixed(name: str) -> str:
    """Returns the types of a Q4_K_M file: values and down projections in Q6_K, beside Q4_K."""
    return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.")) else "Q4_K"


def mxfp4(name: str) -> str:
    """Returns the types of gpt-oss as it is published: experts in MXFP4, the rest in Q8_0."""
    return "MXFP4" if "_exps" in name else "Q8_0"


@dataclass(frozen=True)
class Written:
    file: Path
    reference: Path  # a Hugging Face checkpoint


def write(
    kind: str, folder: Path, types: str | Types = "Q8_0", *, seed: int = 0, more: Metadata = MappingProxyType({})
) -> Written:
    """Writes folder/model.gguf and the reference.

    types: the type of all matrices, or a function from a matrix's name to its type. more: metadata to add or overwrite
    """
    torch.manual_seed(seed)
    row, reference = KINDS[kind], folder / "reference"
    row.model().save_pretrained(reference)
    row.tokenizer().save_pretrained(reference)
    config = json.loads((reference / "config.json").read_text())
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), row.architecture)
    hyperparameters(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    _rope_factors(writer, config)
    tokenizer = json.loads((reference / "tokenizer.json").read_text())
    add_metadata(writer, vocabulary(tokenizer, VOCAB, scores=scores_of(tokenizer)) | dict(more))
    template = json.loads((reference / "tokenizer_config.json").read_text()).get("chat_template")
    writer.add_chat_template(template or (reference / "chat_template.jinja").read_text())
    rng, weights = np.random.default_rng(seed), load_file(reference / "model.safetensors")
    _activations(writer, weights)
    for (name, stored), weight in _stored(weights, config).items():
        _randomize(name, weight, rng, config)
        kept_whole = weight.dim() == 1 or stored.endswith(".bias") or any(part in stored for part in WHOLE)
        type = "F32" if kept_whole else types if isinstance(types, str) else types(stored)
        weight.copy_(_add(writer, stored, name, weight, type, rng, config))
    whole = {name: _interleaved(name, weight, config).clone() for name, weight in weights.items()}
    save_file(whole, reference / "model.safetensors", {"format": "pt"})
    finish(writer)
    return Written(folder / "model.gguf", reference)


def _stored(weights: dict[str, torch.Tensor], config: Metadata) -> dict[tuple[str, str], torch.Tensor]:
    """Returns the stored tensors, views of `weights`, with their names in Hugging Face and in GGUF.

    The weights of experts become views of one tensor per layer.
    """
    names, found = name_map(config), {}
    for name, weight in stacked_experts(weights).items():
        if ".act_fn." in name:
            continue
        if "shared_mlp." in name:
            found |= {(name, stored): part for stored, part in _of_shared_mlp(name, weight, config)}
            continue
        if name.endswith("in_proj_qkvz.weight"):
            weights[name] = sorted = weight[_by_kind(config)]
            gates = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            found[name, stored_name(names, name.replace("qkvz", "qkv"))] = sorted[:-gates]
            found[name, stored_name(names, name.replace("qkvz", "z"))] = sorted[-gates:]
            continue
        if name.endswith("kv_b_proj.weight"):
            heads = weight.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = heads.split((config["qk_nope_head_dim"], config["v_head_dim"]), dim=1)
            found[name, stored_name(names, name.replace("kv_b", "k_b"))] = keys.mT
            found[name, stored_name(names, name.replace("kv_b", "v_b"))] = values
            continue
        stored = stored_name(names, name)
        found[name, stored] = weight[0] if stored.endswith("ffn_gate_inp_shexp.weight") else weight
    return found


def _of_shared_mlp(name: str, weight: torch.Tensor, config: Metadata) -> list[tuple[str, torch.Tensor]]:
    """Returns the parts of Granite 4's MLP, which is a shared expert in models with experts, by their names in GGUF."""
    layer, kind = name.split(".")[2], "_shexp" if config["num_local_experts"] else ""
    parts = zip(("gate", "up"), weight.chunk(2), strict=True) if "input_linear" in name else [("down", weight)]
    return [(f"blk.{layer}.ffn_{part}{kind}.weight", rows) for part, rows in parts]


def _by_kind(config: Metadata) -> torch.Tensor:
    """Returns an order of Qwen3-Next's rows: the queries of all key heads, then their keys, values and gates."""
    heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    sizes = (key_dim, key_dim, values, values)
    rows = torch.arange(heads * sum(sizes)).view(heads, -1).split_with_sizes(sizes, dim=1)
    return torch.cat([kind.flatten() for kind in rows])


def _interleaved(name: str, weight: torch.Tensor, config: Metadata) -> torch.Tensor:
    """Undoes _stored's reordering of a weight of Qwen3-Next."""
    return weight[_by_kind(config).argsort()] if name.endswith("in_proj_qkvz.weight") else weight


def stacked_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns views with the experts of a layer in one tensor [E, N, K], under the names that the converter uses."""
    found, experts = {}, defaultdict(list)
    for name, weight in weights.items():
        if one := re.fullmatch(r"(.+\.experts\.)\d+\.(\w+)\.weight", name):
            stem = one[1].replace("model.layers", "layers") if "block_sparse_moe" in name else one[1]
            experts[f"{stem.replace('block_sparse_moe', 'feed_forward')}{one[2]}.weight"].append(name)
        elif name.endswith("block_sparse_moe.input_linear.weight"):  # Granite
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True):
                found[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}")] = half
        elif ".mlp.experts." not in name and ".experts." in name:  # Gemma 4
            found[_as_module(name)] = weight
        elif ".experts.gate_up_proj" in name:  # gpt-oss: weights are [inputs, outputs], gate and up alternate
            rows = weight if name.endswith("_bias") else weight.mT
            for at, part in enumerate(("gate_proj", "up_proj")):
                found[_as_module(name.replace("gate_up_proj", part))] = rows[:, at::2]
        elif ".experts." in name:
            found[_as_module(name)] = weight if name.endswith("_bias") else weight.mT
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = weight
    for name, parts in experts.items():
        found[name] = torch.stack([weights[part] for part in parts])
        weights |= dict(zip(parts, found[name], strict=True))
    return found


def _as_module(name: str) -> str:
    return f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else f"{name}.weight"


def _randomize(name: str, weight: torch.Tensor, rng: np.random.Generator, config: Metadata) -> None:
    if "norm" in name:
        weight += torch.from_numpy(rng.normal(0, 0.1, weight.shape).astype(np.float32))
    if "post_" in name and config["model_type"].startswith("gemma"):  # see tests/checkpoints.py
        weight += 8.0
    if name.endswith((".bias", ".sinks.weight", ".dt_bias")):
        weight.copy_(torch.from_numpy(rng.normal(0, 0.1, weight.shape).astype(np.float32)))


def _add(
    writer: gguf.GGUFWriter,
    stored: str,
    name: str,
    weight: torch.Tensor,
    type: str,
    rng: np.random.Generator,
    config: Metadata,
) -> torch.Tensor:
    """Adds a tensor. Returns the weight as the file has it, in the layout of Hugging Face."""
    numbers = np.ascontiguousarray(weight.numpy())
    if type == "F32":
        writer.add_tensor(stored, stored_numbers(name, numbers, config))
        return weight
    numbers = stored_columns(name, numbers, config)
    kind, flat = gguf.GGMLQuantizationType[type], numbers.reshape(-1, numbers.shape[-1])
    rows = gguf.quants.quantize(flat, kind) if type in PLAIN else random_rows(*flat.shape, type, rng, 0.08)
    writer.add_tensor(stored, stored_rows(name, rows.reshape(*numbers.shape[:-1], -1), config), raw_dtype=kind)
    return torch.from_numpy(original_columns(name, dequantized(rows, type), config)).view(weight.shape)


def _activations(writer: gguf.GGUFWriter, weights: dict[str, torch.Tensor]) -> None:
    """Writes the parameters of the activations of all layers (Apertus) into the metadata."""
    for parameter in ("alpha_p", "alpha_n", "beta", "eps"):
        found = {name: weight for name, weight in weights.items() if name.endswith(f".act_fn.{parameter}")}
        if found:
            by_layer = sorted(found, key=lambda name: int(name.split(".")[2]))
            getattr(writer, f"add_xielu_{parameter}")([found[name].float().item() for name in by_layer])


def _rope_factors(writer: gguf.GGUFWriter, config: Metadata) -> None:
    """Writes a rotary scaling with a factor for each pair of dimensions."""
    rope, head_dim = config["rope_parameters"], config.get("head_dim") or HEAD_DIM
    if config["model_type"] == "gemma4_text":
        writer.add_tensor("rope_freqs.weight", rotary_factors(config))
    match rope.get("rope_type"):
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
    """Returns the divisor of each frequency in Llama 3's scaling."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float32] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return factors


def vocabulary(
    tokenizer: Metadata, size: int, *, pre: str = "gpt-2", scores: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the metadata of a tokenizer.json: byte-level BPE, or with `scores` SentencePiece's BPE.

    size: rows of the embedding; the last rows may have no token.
    """
    metadata = gguf_file.vocabulary(tokenizer, size, pre=pre)
    if scores is None:
        return metadata
    kinds, prefix = gguf.TokenType, "tokenizer.ggml."
    texts, types, found = metadata[prefix + "tokens"], metadata[prefix + "token_type"], []
    for token, (text, type) in enumerate(zip(texts, types, strict=True)):
        if type == kinds.NORMAL and text.startswith("<0x"):
            types[token] = int(kinds.BYTE)
        if type == kinds.USER_DEFINED:
            texts[token] = text.replace("▁", " ")
        found.append(-1000.0 if type in (kinds.CONTROL, kinds.USER_DEFINED) else scores.get(text, -2000.0))
    unknown = tokenizer["model"]["vocab"][tokenizer["model"]["unk_token"]]
    kept = {key: value for key, value in metadata.items() if key not in (prefix + "pre", prefix + "merges")}
    return kept | {
        prefix + "model": "llama", prefix + "scores": found, prefix + "unknown_token_id": unknown,
        prefix + "add_space_prefix": "Prepend" in json.dumps(tokenizer["normalizer"]),
    }  # fmt: skip


def scores_of(tokenizer: Metadata) -> dict[str, float] | None:
    """Returns scores in the order of the merges, for a tokenizer with byte tokens; None for another tokenizer."""
    if not tokenizer["model"]["byte_fallback"]:
        return None
    return {"".join(pair): -float(rank) for rank, pair in enumerate(tokenizer["model"]["merges"])}
