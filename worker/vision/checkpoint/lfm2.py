"""Reads configs of LFM2-VL: its tower is a SigLIP 2 for pictures of any shape."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel

Config = Mapping[str, Any]
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
