"""Makes a VisionSpec from the files of a checkpoint and the row of its family.

A config leaves out settings that equal the defaults of its class in transformers, so the rows state these defaults.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isqrt
from pathlib import Path
from typing import Any

from shared.images import MAX_PATCHES
from worker.checkpoint.checkpoint import UnsupportedModel
from worker.vision.gemma4 import gemma4_fields, unified_fields
from worker.vision.spec import VISION_ACTIVATIONS, Connector, Layout, VisionSpec

# Reads configs of models with a Pixtral tower: Pixtral, Mistral Small 3, Ministral 3, and LLaVA models with it.

Config = Mapping[str, Any]


def pixtral_fields(config: Config, vision: Config, processor: Config) -> dict[str, Any]:
    """Returns the fields of VisionSpec that only this family sets. Raises UnsupportedModel, which names the setting.

    config: config.json with defaults
    """
    if (kind := vision.get("model_type")) != "pixtral":
        raise UnsupportedModel(f"vision_config: model_type {str(kind)[:80]!r} is not supported: only 'pixtral' is")
    if vision.get("head_dim") not in (None, vision["hidden_size"] // vision["num_attention_heads"]):
        raise UnsupportedModel(f"vision_config: head_dim {str(vision['head_dim'])[:80]} is not supported")
    merges = config["model_type"] == "mistral3"
    layer = config.get("vision_feature_layer", -1 if merges else -2)
    if layer not in (-1, [-1]):
        raise UnsupportedModel(f"vision_feature_layer {str(layer)[:80]} is not supported: only the last layer, -1, is")
    strategy = config.get("vision_feature_select_strategy", "default")
    if not merges and strategy != "full":
        raise UnsupportedModel(
            f"vision_feature_select_strategy {str(strategy)[:80]!r} is not supported: only 'full' is"
        )
    if (act := config.get("projector_hidden_act", "gelu")) != "gelu":
        raise UnsupportedModel(f"projector_hidden_act {str(act)[:80]!r} is not supported: only 'gelu' is")
    text = config.get("text_config") or {}
    rope = vision.get("rope_parameters") or vision
    return {
        "image_size": 0, "rotary_theta": float(rope.get("rope_theta", 10000.0)), "rotary_alternate": True,
        "connector_eps": float(text.get("rms_norm_eps", 1e-5)) if merges else 0.0,
        "connector_biased": bool(config.get("multimodal_projector_bias", not merges)), "row_ends": True,
    }  # fmt: skip


# Reads configs of LFM2-VL: its tower is a SigLIP 2 for images of any shape.

MOST = 1 << 18  # limit on the width of vectors between the connector's linears, and on learned positions
LAYER_NORM_EPS = 1e-5  # the default of torch's layer norm; configs do not state it


def lfm2_fields(config: Config, vision: Config, processor: Config) -> dict[str, Any]:
    """Returns the fields of VisionSpec that only this family sets. Raises UnsupportedModel, which names the setting.

    config: config.json. vision: its vision_config with defaults
    """
    if (kind := vision.get("model_type", "siglip2_vision_model")) != "siglip2_vision_model":
        raise UnsupportedModel(f"vision_config: model_type {str(kind)[:80]!r} is not supported")
    if (layer := config.get("vision_feature_layer", -1)) != -1:
        raise UnsupportedModel(f"vision_feature_layer {str(layer)[:80]} is not supported: only the last layer, -1, is")
    if (act := config.get("projector_hidden_act", "gelu")) != "gelu":
        raise UnsupportedModel(f"projector_hidden_act {str(act)[:80]!r} is not supported: only 'gelu' is")
    patches, between = vision.get("num_patches", 256), config.get("projector_hidden_size", 2560)
    if not isinstance(patches, int) or not 1 <= patches <= MOST or isqrt(patches) ** 2 != patches:
        raise UnsupportedModel(f"vision_config: num_patches {str(patches)[:80]} is not supported: it is a square")
    if not isinstance(between, int) or not 1 <= between <= MOST:
        raise UnsupportedModel(f"projector_hidden_size {str(between)[:80]} is not supported")
    return {
        "image_size": 0, "position_side": isqrt(patches), "position_corners": False, "connector_size": between,
        "connector_biased": bool(config.get("projector_bias", True)),
        "joined_eps": LAYER_NORM_EPS if config.get("projector_use_layernorm", True) else 0.0,
    }  # fmt: skip


HALF = (0.5, 0.5, 0.5)
PROCESSOR, NESTED = "preprocessor_config.json", "processor_config.json"
SIZES = {  # the largest values that a config may state
    "image_size": 1 << 14, "patch_size": 1 << 10, "hidden_size": 1 << 16, "intermediate_size": 1 << 18,
    "num_hidden_layers": 1 << 10, "num_attention_heads": 1 << 10, "scale_factor": 64, "spatial_merge_size": 64,
    "mm_tokens_per_image": 1 << 14, "temporal_patch_size": 16, "num_position_embeddings": 1 << 20,
    "out_hidden_size": 1 << 18, "downsample_factor": 64, "pooling_kernel_size": 64, "window_size": 1 << 14,
    "image_token_id": 1 << 31, "image_token_index": 1 << 31,
}  # fmt: skip
OF_TOWER = tuple(SIZES)[:6]
MAX_HEAD = 512


def _shuffled(config: Config, grid: int) -> int:
    return _size(config, "scale_factor", 2)


def _pooled(config: Config, grid: int) -> int:
    return grid // isqrt(_size(config, "mm_tokens_per_image", 256))


def _merged(config: Config, grid: int) -> int:
    return _size(config["vision_config"], "spatial_merge_size", 2)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A row: the connector of the family, and the defaults that its configs leave out.

    side: a function from the number of patches along a side of the grid to VisionSpec.side
    placeholder: the names of the placeholder's token id in config.json
    """

    connector: Connector
    side: Callable[[Config, int], int]
    placeholder: tuple[str, ...]
    default_placeholder: int
    defaults: Config
    bucketed: bool = False
    bidirectional: bool = False
    names: Config = field(default_factory=dict)  # the names of the sizes in the family's config
    layout: Layout = "siglip"
    gated: bool = False
    sections: tuple[int, int, int] = (11, 11, 10)  # VisionSpec.sections if the config leaves it out
    sections_alternate: bool = True
    any_size: bool = False  # whether an image may have any size that consists of whole squares of patches
    # For an any_size family without M-RoPE: makes fields of VisionSpec from config.json, its vision_config, and the
    # image processor's settings.
    fields: Callable[[Config, Config, Config], dict[str, Any]] | None = None
    normalizes: bool = True  # the default if the processor's settings do not say whether it normalizes
    towerless: bool = False  # whether there is no tower; `fields` then returns all fields


_BASE = {"patch_size": 16, "num_hidden_layers": 12, "intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh",
         "image_size": 224, "layer_norm_eps": 1e-6, "num_channels": 3}  # fmt: skip
IDEFICS3 = VisionFamily(
    "shuffle", _shuffled, ("image_token_id",), 128257,
    {**_BASE, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}, bucketed=True,
)  # fmt: skip
GEMMA3 = VisionFamily(
    "pool", _pooled, ("image_token_index", "image_token_id"), 262144,
    {**_BASE, "hidden_size": 768, "num_attention_heads": 12}, bidirectional=True,
)  # fmt: skip
QWEN3_5 = VisionFamily(
    "merge", _merged, ("image_token_id",), 248056,
    {
        "patch_size": 16, "depth": 27, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        "image_size": 0, "layer_norm_eps": 1e-6, "hidden_size": 1152, "num_heads": 16, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "spatial_merge_size": 2, "out_hidden_size": 3584,
    },
    names={"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"},
    any_size=True, layout="qwen3",
)  # fmt: skip
QWEN2_5_VL = VisionFamily(
    "merge", _merged, ("image_token_id",), 151655,
    {
        "patch_size": 14, "depth": 32, "intermediate_size": 3420, "hidden_act": "silu", "in_channels": 3,
        "image_size": 0, "layer_norm_eps": 1e-6, "hidden_size": 3584, "num_heads": 16, "temporal_patch_size": 2,
        "num_position_embeddings": 0, "spatial_merge_size": 2, "out_hidden_size": 3584, "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    names=QWEN3_5.names, any_size=True, layout="qwen2_5", gated=True, sections=(16, 24, 24),
    sections_alternate=False,
)  # fmt: skip
QWEN3_VL = replace(
    QWEN3_5, default_placeholder=151655, defaults={**QWEN3_5.defaults, "deepstack_visual_indexes": (8, 16, 24)}
)
PIXTRAL = VisionFamily(
    "merge", lambda config, grid: 1, ("image_token_index", "image_token_id"), 32000,
    {
        "patch_size": 16, "num_hidden_layers": 24, "intermediate_size": 4096, "hidden_act": "gelu", "num_channels": 3,
        "image_size": 0, "layer_norm_eps": 1e-5, "hidden_size": 1024, "num_attention_heads": 16,
    },
    any_size=True, layout="pixtral", gated=True, fields=pixtral_fields,
)  # fmt: skip
MISTRAL3 = replace(PIXTRAL, side=lambda config, grid: _size(config, "spatial_merge_size", 2), default_placeholder=10)
GEMMA4 = VisionFamily(
    "scaled_pool", lambda config, grid: _size(config["vision_config"], "pooling_kernel_size", 3), ("image_token_id",),
    258880,
    {
        **_BASE, "num_hidden_layers": 16, "hidden_size": 768, "num_attention_heads": 12, "image_size": 0,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "position_embedding_size": 10240,
    },
    names={"hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps"}, any_size=True, layout="gemma4",
    gated=True, fields=gemma4_fields, normalizes=False,
)  # fmt: skip
GEMMA4_UNIFIED = VisionFamily(
    "none", lambda config, grid: 1, ("image_token_id",), 258880, {}, layout="gemma4_unified", fields=unified_fields,
    normalizes=False, towerless=True,
)  # fmt: skip
LFM2_VL = VisionFamily(
    "merge", lambda config, grid: _size(config, "downsample_factor", 2), ("image_token_id",), 396,
    {**_BASE, "hidden_size": 768, "num_attention_heads": 12, "image_size": 0},
    any_size=True, layout="siglip2", fields=lfm2_fields,
)  # fmt: skip
FAMILIES: Mapping[str, VisionFamily] = {  # keys: model_type in config.json
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4_UNIFIED,
    "idefics3": IDEFICS3,
    "lfm2_vl": LFM2_VL,
    "llava": PIXTRAL,
    "mistral3": MISTRAL3,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "smolvlm": IDEFICS3,
}


def vision_spec(folder: Path, config: Config, text_size: int) -> VisionSpec | None:
    """Returns the spec of a checkpoint's tower; None if its family has no supported tower.

    config: config.json. text_size: hidden size of the text model. Raises UnsupportedModel, which names the setting, if
    the family is supported but a setting of its tower is not.
    """
    family, vision = FAMILIES.get(str(config.get("model_type"))), config.get("vision_config")
    if family is None or not isinstance(vision, dict):
        return None
    try:
        return _spec(family, folder, config, vision, text_size)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"a setting of the vision tower or its processor has a wrong type ({error})") from error


def _spec(family: VisionFamily, folder: Path, config: Config, stated: Config, text_size: int) -> VisionSpec:
    processor = {"do_normalize": family.normalizes, **_processor(folder)}
    common: dict[str, Any] = {
        "text_size": text_size, "gated": family.gated,
        "layout": family.layout, "connector": family.connector,
        "placeholder": next(
            (_size(config, name, 0) for name in family.placeholder if config.get(name) is not None),
            family.default_placeholder,
        ),
        "rescale": float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0,
        "mean": _channels(processor, "image_mean", HALF, (0.0, 0.0, 0.0)),
        "std": _channels(processor, "image_std", HALF, (1.0, 1.0, 1.0)),
    }  # fmt: skip
    if family.towerless and family.fields is not None:
        return VisionSpec(activation="gelu_tanh", **common, **family.fields(config, stated, processor))
    vision = {**family.defaults, **stated}
    vision |= {common: vision[own] for common, own in family.names.items()}
    _check(vision, family)
    if family.fields is not None:
        own = family.fields(config, vision, processor)
    else:
        own = _of_any_size(family, config, vision, text_size) if family.any_size else {}
    spec = VisionSpec(
        patch_size=vision["patch_size"],
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        layers=vision["num_hidden_layers"],
        heads=vision["num_attention_heads"],
        norm_eps=float(vision["layer_norm_eps"]),
        activation=VISION_ACTIVATIONS[vision["hidden_act"]],
        bucketed=family.bucketed,
        side=family.side(
            {**config, "vision_config": vision}, 0 if family.any_size else vision["image_size"] // vision["patch_size"]
        ),
        **{"image_size": vision["image_size"], "bidirectional": family.bidirectional, **own},
        **common,
    )
    grid = spec.image_size // spec.patch_size
    if not family.any_size and (not 1 <= spec.side <= grid or grid % spec.side):
        raise UnsupportedModel(
            f"vision_config: {grid} patches along a side cannot be joined by {spec.side}, so images have no "
            "whole number of tokens"
        )
    return spec


def _of_any_size(family: VisionFamily, config: Config, vision: Config, text_size: int) -> dict[str, Any]:
    """Returns the fields of a tower with rotary positions. The connector's MLP has the text model's width."""
    if _size(vision, "out_hidden_size", 0) != text_size:
        raise UnsupportedModel(f"vision_config: out_hidden_size {vision['out_hidden_size']} is not {text_size}")
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section") or family.sections
    if len(sections) != 3 or not all(isinstance(pairs, int) and 0 <= pairs <= MAX_HEAD for pairs in sections):
        raise UnsupportedModel(f"mrope_section {str(sections)[:80]} is not supported: it has three numbers of pairs")
    side = 0
    if vision["num_position_embeddings"] or not family.defaults.get("window_size"):
        side = isqrt(_size(vision, "num_position_embeddings", 0))
    if side * side != vision["num_position_embeddings"]:
        raise UnsupportedModel("vision_config: num_position_embeddings is not a square")
    own = vision.get("rope_parameters") or {}
    deepstack = vision.get("deepstack_visual_indexes") or ()
    if list(deepstack) != sorted({*deepstack}) or not {*deepstack} <= {*range(vision["num_hidden_layers"])}:
        raise UnsupportedModel(f"deepstack_visual_indexes {str(deepstack)[:80]} are not layers of the tower, in order")
    if len(deepstack) >= text.get("num_hidden_layers", inf):
        raise UnsupportedModel("deepstack_visual_indexes are as many as the text model has layers")
    return {
        "deepstack": tuple(deepstack),
        "frames": _size(vision, "temporal_patch_size", 0), "position_side": side, "sections": tuple(sections),
        "rotary_theta": float(own.get("rope_theta", 10000.0)), "sections_alternate": family.sections_alternate,
        **_windows(vision),
    }  # fmt: skip


def _windows(vision: Config) -> dict[str, Any]:
    """Returns the fields of a tower with attention in windows; nothing for other towers."""
    if "window_size" not in vision:
        return {}
    square = vision["patch_size"] * vision["spatial_merge_size"]
    whole = vision["fullatt_block_indexes"]
    if not all(isinstance(layer, int) and layer >= 0 for layer in whole):
        raise UnsupportedModel(f"fullatt_block_indexes {str(whole)[:80]} are not layers of the tower")
    if (window := _size(vision, "window_size", 0)) < square:
        raise UnsupportedModel(f"window_size {window} of a vision tower is less than the {square} pixels of a token")
    return {"window": window // square * vision["spatial_merge_size"], "whole_layers": tuple(whole)}


def _check(vision: Config, family: VisionFamily) -> None:
    any_size = family.any_size
    for name in OF_TOWER[any_size:]:
        _size(vision, name, 0)
    if (act := vision["hidden_act"]) not in VISION_ACTIVATIONS:
        served = ", ".join(VISION_ACTIVATIONS)
        raise UnsupportedModel(f"vision_config: hidden_act {str(act)[:80]!r} is not supported; supported are {served}")
    if vision["num_channels"] != 3:
        raise UnsupportedModel(f"vision_config: num_channels {vision['num_channels']!r} is not supported")
    if vision["hidden_size"] % vision["num_attention_heads"]:
        raise UnsupportedModel("vision_config: hidden_size is not a multiple of num_attention_heads")
    head = vision["hidden_size"] // vision["num_attention_heads"]
    if head > MAX_HEAD or (any_size and head % 4):
        raise UnsupportedModel(f"vision_config: heads of {head} dimensions are not supported")
    if not any_size and not 1 <= (vision["image_size"] // vision["patch_size"]) ** 2 <= MAX_PATCHES:
        raise UnsupportedModel(f"vision_config: images of no patch, or of more than {MAX_PATCHES}, are not supported")


def _size(config: Config, name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZES[name]:
        raise UnsupportedModel(f"{name} {str(value)[:80]} of a model with a vision tower is not supported")
    return value


def _processor(folder: Path) -> Config:
    """Returns the settings of the image processor; nothing if the checkpoint has none."""
    for name in (PROCESSOR, NESTED):
        file = folder / name
        if not file.exists():
            continue
        try:
            settings = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{file} is not JSON: {error}") from error
        settings = settings.get("image_processor", settings) if isinstance(settings, dict) else settings
        if not isinstance(settings, dict):
            raise UnsupportedModel(f"{file} is not a JSON object")
        return settings
    return {}


def _channels(
    processor: Config, name: str, default: tuple[float, float, float], off: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Returns a setting's values for the three colours. off: the values if images are not normalized"""
    if not processor.get("do_normalize", True):
        return off
    values = processor.get(name) or default
    numbers = [float(value) for value in values] if isinstance(values, list | tuple) else [float(values)] * 3
    if len(numbers) != 3 or (name == "image_std" and not all(numbers)):
        raise UnsupportedModel(f"{name} {str(values)[:80]} is not supported: it has a number for each of three colours")
    return numbers[0], numbers[1], numbers[2]
