"""Makes a RopeSpec from the rotary settings of a Hugging Face config, given as one flat dict, for any model family.

The defaults of each rotary kind equal the defaults in transformers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel
from worker.model.config_values import checked_rope
from worker.spec import RopeSpec

Config = Mapping[str, Any]


def rope_spec(settings: Config, config: Config, head_dim: int, *, partial: bool) -> RopeSpec:
    """Returns the RopeSpec of one kind of layer. partial: whether the model family may rotate only a part of each head

    Raises UnsupportedModel if the kind or a value is not supported.
    """
    settings = checked_rope(settings)
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = "longrope" if "short_factor" in settings else kind  # older configs call longrope "su" or "yarn"
    read = ROPE_KINDS.get(kind)
    if read is None:
        raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    positions = config["max_position_embeddings"]
    before = settings.get("original_max_position_embeddings")
    before = before or (config.get("original_max_position_embeddings") if kind == "longrope" else None) or positions
    spec = read({**settings, "original_positions": int(before), "positions": positions, "head_dim": head_dim})
    return spec if kind == "proportional" else replace(spec, rotated=_rotated(settings, head_dim, partial))


def _rotated(settings: Config, head_dim: int, partial: bool) -> int:
    """Returns how many dimensions of a head are rotated; 0: all."""
    part = settings.get("partial_rotary_factor") or 1.0
    if part == 1.0:
        return 0
    if not partial:
        raise UnsupportedModel("partial_rotary_factor is not supported: this family rotates whole heads")
    return int(head_dim * part)


def _default_rope(settings: Config) -> RopeSpec:
    return RopeSpec("default", float(settings["rope_theta"]))


def _dynamic_rope(settings: Config) -> RopeSpec:
    """Returns the default kind. Up to the positions that the model was trained for, it rotates as the kind "dynamic"
    does.

    If the settings have an `alpha`, theta is multiplied by a power of it (Hunyuan).
    """
    theta, size, alpha = float(settings["rope_theta"]), settings["head_dim"], settings.get("alpha")
    if alpha and size <= 2:
        raise UnsupportedModel(f"alpha of rotary settings is not supported for heads of {size} dimensions")
    return RopeSpec("default", theta * alpha ** (size / (size - 2)) if alpha else theta)


def _linear_rope(settings: Config) -> RopeSpec:
    return RopeSpec("linear", float(settings["rope_theta"]), float(settings["factor"]))


def _proportional_rope(settings: Config) -> RopeSpec:
    part = settings.get("partial_rotary_factor")
    pairs = int((1.0 if part is None else part) * settings["head_dim"] // 2)
    return RopeSpec("proportional", float(settings["rope_theta"]), float(settings.get("factor") or 1.0), pairs=pairs)


def _llama3_rope(settings: Config) -> RopeSpec:
    return RopeSpec(
        "llama3",
        float(settings["rope_theta"]),
        float(settings["factor"]),
        low_freq_factor=float(settings["low_freq_factor"]),
        high_freq_factor=float(settings["high_freq_factor"]),
        original_positions=settings["original_positions"],
    )


def _yarn_rope(settings: Config) -> RopeSpec:
    return RopeSpec(
        "yarn",
        float(settings["rope_theta"]),
        float(settings["factor"]),
        original_positions=settings["original_positions"],
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        truncate=settings.get("truncate", True),
        magnitude=_yarn_magnitude(settings),
    )


def _longrope(settings: Config) -> RopeSpec:
    original = settings["original_positions"]
    if original < 2:
        raise UnsupportedModel(f"original_max_position_embeddings {original} is not supported with longrope")
    factor = settings.get("factor") or settings["positions"] / original
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention_factor = settings.get("attention_factor")
    return RopeSpec(
        "longrope",
        float(settings["rope_theta"]),
        original_positions=original,
        factors=tuple(map(float, settings["short_factor"])),
        magnitude=grown if attention_factor is None else float(attention_factor),
    )


def _yarn_magnitude(settings: Config) -> float:
    """Returns the factor of cos and sin: the setting `attention_factor`, or else equation 22 of arXiv 2309.00071.

    If the config has `mscale` and `mscale_all_dim`, the factor is the equation with `mscale` as weight, divided by the
    equation with `mscale_all_dim` as weight.
    """
    attention_factor = settings.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0

    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    return growth(above) / growth(below) if above and below else growth(1.0)


NO_ROPE = RopeSpec("none", 1.0)
ROPE_KINDS: Mapping[str, Callable[[Config], RopeSpec]] = {
    "default": _default_rope,
    "mrope": _default_rope,  # text rotates by the default; only tokens of pictures differ (worker/vision/rotary.py)
    "dynamic": _dynamic_rope,
    "linear": _linear_rope,
    "proportional": _proportional_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _longrope,
}
