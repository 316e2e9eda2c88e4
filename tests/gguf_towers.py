"""Writes a checkpoint with vision as two GGUF files, text model and tower, as llama.cpp's converter does.

The weights keep their values, so that both forms answer with the same bits. The order of tensors is random.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.peers.gguf_file import add_metadata, architecture, finish, name_map, stored_name, vocabulary
from bench.peers.gguf_layout import stored_numbers
from bench.peers.gguf_values import hyperparameters
from tests.checkpoints import VOCAB
from tests.worker.vision.harness import PIXTRALS

Config = Mapping[str, Any]
KINDS = gguf.VisionProjectorType
PROJECTORS = {
    "idefics3": KINDS.IDEFICS3, "smolvlm": KINDS.IDEFICS3, "gemma3": KINDS.GEMMA3, "qwen2_5_vl": KINDS.QWEN25VL,
    "mistral3": KINDS.PIXTRAL, "llava": KINDS.PIXTRAL, "lfm2_vl": KINDS.LFM2,
    "qwen3_vl": KINDS.QWEN3VL, "qwen3_vl_moe": KINDS.QWEN3VL, "qwen3_5": KINDS.QWEN3VL,
}  # fmt: skip
OF_TOWER = re.compile(r"(?:.*\.)?(vision_model|vision_tower|visual|connector|multi_modal_projector)\.(.+)")
BY_LAYER = re.compile(r"deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(.+)")
MERGER = {  # names that do not follow the converter's usual rules
    "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "merger.ln_q": "v.post_ln",
    "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2",
}  # fmt: skip


def rounded(folder: Path) -> Path:
    """Rounds the vectors of a checkpoint, so that adding 1 to Gemma's norms and subtracting it again is exact."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for weight in weights.values():
        if weight.ndim == 1:
            weight.copy_((weight * 4096).round() / 4096)
    save_file(weights, file, {"format": "pt"})
    return folder


def write_pair(
    checkpoint: Path, folder: Path, *, types: str = "F32", apart: bool = False, swapped: bool = False,
    changes: Mapping[str, Any] | None = None, name: str = "model", seed: int = 0,
) -> tuple[Path, Path]:  # fmt: skip
    """Writes folder/model.gguf and folder/mmproj-model-F32.gguf, and returns both.

    types: types of the tower's matrices. apart: whether queries, keys and values of a Qwen are three tensors, as in
    older files. swapped: whether the names of an MLP's two linears are swapped, as in older files
    changes: metadata of the tower that replaces the converter's; None leaves a value out
    """
    folder.mkdir(exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    weights, rng = load_file(checkpoint / "model.safetensors"), np.random.default_rng(seed)
    text, tower = folder / f"{name}.gguf", folder / f"mmproj-{name}-F32.gguf"
    _write_text(checkpoint, text, config, weights, rng)
    writer = gguf.GGUFWriter(str(tower), "clip")
    metadata = _metadata(checkpoint, config) | dict(changes or {})
    add_metadata(writer, {key: value for key, value in metadata.items() if value is not None})
    tensors = list(_tower(config, weights, apart))
    rng.shuffle(tensors)  # type: ignore[arg-type]
    for stored, weight in tensors:
        if swapped and ".ffn_" in stored:
            stored = stored.replace("ffn_up", "*").replace("ffn_down", "ffn_up").replace("*", "ffn_down")
        _add(writer, stored, weight, types)
    finish(writer)
    return text, tower


def _write_text(
    checkpoint: Path, file: Path, config: Config, weights: Mapping[str, Tensor], rng: np.random.Generator
) -> None:
    inner = {**config["text_config"], "dtype": "float32"}
    writer = gguf.GGUFWriter(str(file), architecture(inner))
    hyperparameters(writer, inner)
    # the converter states no pattern, because in published models every sixth layer is full
    if inner["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in inner["layer_types"]])
    if stacked := config["vision_config"].get("deepstack_visual_indexes"):
        writer.add_uint32(f"{architecture(inner)}.n_deepstack_layers", len(stacked))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    add_metadata(writer, vocabulary(tokenizer, VOCAB))
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
    names, found = name_map(inner), []
    for name, weight in weights.items():
        if OF_TOWER.fullmatch(name):
            continue
        plain = re.sub(r"^.*?(layers\.|embed_tokens\.|(?:embedding_)?norm\.)", r"model.\1", name)
        plain = "lm_head.weight" if "lm_head" in name else plain
        found += [(one, stored_name(names, one), part) for one, part in _of_experts(plain, weight)]
    rng.shuffle(found)  # type: ignore[arg-type]
    for name, stored, weight in found:
        writer.add_tensor(stored, stored_numbers(name, np.ascontiguousarray(weight.float().numpy()), inner))
    finish(writer)


def _of_experts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    if name.endswith("experts.gate_up_proj"):
        return [(name.replace("gate_up", part) + ".weight", half) for part, half in
                zip(("gate", "up"), weight.chunk(2, 1), strict=True)]  # fmt: skip
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, weight)]


def _metadata(checkpoint: Path, config: Config) -> dict[str, Any]:
    vision, kind = config["vision_config"], config["model_type"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    grid, patch = vision.get("num_position_embeddings"), vision["patch_size"]
    values: dict[str, Any] = {
        "clip.has_vision_encoder": True, "clip.projector_type": PROJECTORS[kind], "general.type": "mmproj",
        "clip.use_silu" if kind == "qwen2_5_vl" else "clip.use_gelu": True,
    }  # fmt: skip
    size = processor.get("size", {})
    of_vision = {
        "projection_dim": config["text_config"]["hidden_size"], "patch_size": patch,
        "image_size": vision.get("image_size") or (int(grid**0.5) * patch if grid else 560),
        "embedding_length": vision["hidden_size"], "feed_forward_length": vision["intermediate_size"],
        "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-5 if kind in PIXTRALS else 1e-6,
        "image_mean": processor["image_mean"], "image_std": processor["image_std"],
        "preproc_image_size": size.get("longest_edge") if kind in ("idefics3", "smolvlm") else None,
        "image_min_pixels": size.get("shortest_edge"),
        "image_max_pixels": size.get("longest_edge") if "shortest_edge" in size else None,
        "spatial_merge_size": vision.get("spatial_merge_size") or config.get("spatial_merge_size"),
        "window_size": vision.get("window_size"),
    }  # fmt: skip
    if kind in PIXTRALS:
        values["clip.rope.freq_base"] = vision["rope_parameters"]["rope_theta"]
        of_vision["image_size"] = size["longest_edge"]
    if kind == "lfm2_vl":
        of_vision |= {"projector.scale_factor": config["downsample_factor"], "image_size": 256}
    if kind in ("idefics3", "smolvlm"):
        of_vision["projector.scale_factor"] = config["scale_factor"]
    if kind == "gemma3":
        of_vision["projector.scale_factor"] = vision["image_size"] // patch // int(config["mm_tokens_per_image"] ** 0.5)
    if whole := vision.get("fullatt_block_indexes"):
        of_vision["n_wa_pattern"] = whole[0] + 1
    if kind.startswith("qwen3"):
        stacked = vision.get("deepstack_visual_indexes", [])
        of_vision["is_deepstack_layers"] = [layer in stacked for layer in range(vision["depth"])]
    return values | {f"clip.vision.{name}": value for name, value in of_vision.items() if value is not None}


def _tower(config: Config, weights: Mapping[str, Tensor], apart: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the tower by their names in GGUF."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 32)
    stacked = config["vision_config"].get("deepstack_visual_indexes", [])
    for name, weight in weights.items():
        found = OF_TOWER.fullmatch(name)
        if not found or found[2].startswith("head."):  # no tensor of the tower, or a head that the converter leaves out
            continue
        part, rest = found[1], found[2]
        module, _, kind = rest.rpartition(".")
        if one := BY_LAYER.fullmatch(rest):
            target = one[2].replace("linear_", "")
            yield f"v.deepstack.{stacked[int(one[1])]}.{target}.{one[3]}", weight
        elif module in MERGER:
            yield f"{MERGER[module]}.{kind}", weight
        elif module.endswith("patch_embedding") and weight.ndim == 2:  # LFM2-VL: written as a convolution
            side = int((weight.shape[1] // 3) ** 0.5)
            yield "v.patch_embd.weight", weight.view(-1, side, side, 3).permute(0, 3, 1, 2)
        elif module.endswith(("attention.q_proj", "attention.k_proj")):  # reorders each head from halves to pairs
            halves = weight.unflatten(0, (config["vision_config"]["num_attention_heads"], 2, -1))
            yield _found(names, f"vision_tower.{rest}"), halves.transpose(1, 2).reshape(weight.shape)
        elif module == "patch_embed.proj" and kind == "weight":
            yield "v.patch_embd.weight", weight[:, :, 0]
            yield "v.patch_embd.weight.1", weight[:, :, 1]
        elif apart and module.endswith("attn.qkv"):
            for letter, rows in zip("qkv", weight.chunk(3), strict=True):
                yield _found(names, f"visual.{module[:-3]}{letter}.{kind}"), rows
        elif rest == "mm_input_projection_weight":
            yield "mm.input_projection.weight", weight
        elif rest == "mm_soft_emb_norm.weight":
            yield "mm.soft_emb_norm.weight", weight + 1
        else:
            before = f"model.{part}" if part in ("connector", "vision_model") else part
            if part == "vision_tower" and config["model_type"] not in PIXTRALS:
                before = "vision_tower.vision_model"
            yield _found(names, f"{before}.{rest}"), weight


def _found(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _add(writer: gguf.GGUFWriter, stored: str, weight: Tensor, types: str) -> None:
    numbers = np.ascontiguousarray(weight.float().numpy())
    kind = gguf.GGMLQuantizationType[types]
    if weight.ndim == 2 and types != "F32" and weight.shape[1] % 32 == 0 and "position" not in stored:
        writer.add_tensor(stored, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    else:
        writer.add_tensor(stored, numbers)


def all_experts(kind: str, model: Any) -> Any:
    """Returns a model of this kind with experts in every layer, because GGUF files cannot state anything else."""
    config = model.config
    config.text_config.mlp_only_layers = []
    torch.manual_seed(5)
    return type(model)(config).eval()
