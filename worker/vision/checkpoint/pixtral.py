"""Reads configs of models with a Pixtral tower: Pixtral, Mistral Small 3, Ministral 3, and LLaVA models with it."""

from collections.abc import Mapping
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel

Config = Mapping[str, Any]
MERGES = "spatial_merge_size"  # only configs of mistral3 state this setting or get its default


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
