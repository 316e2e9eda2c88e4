"""From a Hugging Face config to a ModelSpec: a family is a row of defaults and switches.

Both spellings of rotary settings are read (`rope_parameters`, and the older `rope_theta` + `rope_scaling` +
`rope_local_base_freq`), and both of windows (`layer_types`, and the older patterns). Defaults are those of
transformers' config classes, because config.json leaves out what equals them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.model import quantization
from worker.model.spec import Activation, LayerSpec, ModelSpec, RopeSpec

Config = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
COMMON = {
    "head_dim": None, "num_key_value_heads": None, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10_000.0, "eos_token_id": (), "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


class UnsupportedModel(ValueError):
    """One sentence: what the checkpoint asks for, and what is supported."""


def _every_layer_full(config: Config) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def _window_everywhere(config: Config) -> list[str]:
    return [SLIDING if config["sliding_window"] else FULL] * config["num_hidden_layers"]


def _window_from_layer(config: Config) -> list[str]:
    """Qwen: layers from `max_window_layers` on are windowed, where `use_sliding_window` says so."""
    first = config["max_window_layers"] if config["use_sliding_window"] else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def _window_but_every_nth(config: Config) -> list[str]:
    """Gemma 3: every `sliding_window_pattern`-th layer sees everything."""
    nth = config["sliding_window_pattern"]
    return [SLIDING if (i + 1) % nth else FULL for i in range(config["num_hidden_layers"])]


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type means where its config is silent, and what no config says."""

    defaults: Config
    layer_types: Callable[[Config], list[str]] = _every_layer_full
    norm_offset: bool = False
    sandwich_norms: bool = False
    qk_norm: bool = False
    always_qkv_bias: bool = False
    scale_embeddings: bool = False
    local_rope: bool = False  # windowed layers have rotary settings of their own
    names: Mapping[str, str] = field(default_factory=dict)  # its own name for a common setting


QWEN = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32_768,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "eos_token_id": 1,
    "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family({"vocab_size": 32_000, "max_position_embeddings": 2048, "eos_token_id": 2}),
    "mistral": Family(
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        layer_types=_window_everywhere,
    ),
    "qwen2": Family(QWEN, layer_types=_window_from_layer, always_qkv_bias=True),
    "qwen3": Family({**QWEN, "head_dim": 128}, layer_types=_window_from_layer, qk_norm=True),
    "gemma3_text": Family(
        GEMMA3, layer_types=_window_but_every_nth, norm_offset=True, sandwich_norms=True, qk_norm=True,
        scale_embeddings=True, local_rope=True, names={"hidden_act": "hidden_activation"},
    ),
}  # fmt: skip
INSIDE = {"gemma3": "gemma3_text"}  # multimodal configs that hold a text model of ours as `text_config`


def spec_from_config(config: Config) -> ModelSpec:
    """The spec of a checkpoint's config.json (as a dict, in any spelling since transformers 4.40).

    Raises UnsupportedModel for a family, rotary kind or activation that is not here, and for a config that lacks a
    size; CheckpointError for a quantization that is not here.
    """
    model_type = config.get("model_type")
    name = INSIDE.get(str(model_type), str(model_type))
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join(sorted([*FAMILIES, *INSIDE]))
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; supported are {supported}")
    given = {**config, **config.get("text_config", {})}
    try:
        return _spec(name, family, {**COMMON, **family.defaults, **given})
    except KeyError as error:
        raise UnsupportedModel(f"the config of this {name} model lacks {error.args[0]!r}") from error


def _spec(name: str, family: Family, config: Config) -> ModelSpec:
    heads, head_dim = config["num_attention_heads"], _head_dim(config)
    layers, ropes = _layers(family, config)
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel("attn_logit_softcapping is not supported")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported: only causal models generate text")
    return ModelSpec(
        model_type=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"] or heads,
        head_dim=head_dim,
        layers=layers,
        ropes=ropes,
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        norm_offset=family.norm_offset,
        sandwich_norms=family.sandwich_norms,
        qk_norm=family.qk_norm,
        qkv_bias=family.always_qkv_bias or config["attention_bias"],
        o_bias=not family.always_qkv_bias and config["attention_bias"],
        mlp_bias=config["mlp_bias"],
        attention_scale=config.get("query_pre_attn_scalar", head_dim) ** -0.5,
        activation=_activation(config[family.names.get("hidden_act", "hidden_act")]),
        embed_scale=config["hidden_size"] ** 0.5 if family.scale_embeddings else 1.0,
        logit_softcap=config.get("final_logit_softcapping") or 0.0,
        tied=config["tie_word_embeddings"],
        eos_ids=_ids(config["eos_token_id"]),
        dtype=_dtype(config.get("dtype") or config.get("torch_dtype") or "float32"),
        stored=quantization.read(config),
    )


def _head_dim(config: Config) -> int:
    return int(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _layers(family: Family, config: Config) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """One rotary table for each kind of layer that has settings of its own, and what each layer uses."""
    types = config.get("layer_types") or family.layer_types(config)
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModel(f"layer type {min(unknown)!r} is not supported; supported are {FULL}, {SLIDING}")
    ropes: dict[RopeSpec, int] = {}
    layers = []
    for kind in types[: config["num_hidden_layers"]]:
        rope = ropes.setdefault(_rope(_rope_settings(family, config, kind), config), len(ropes))
        layers.append(LayerSpec(window=config["sliding_window"] if kind == SLIDING else 0, rope=rope))
    return tuple(layers), tuple(ropes)


def _rope_settings(family: Family, config: Config, kind: str) -> Config:
    """The rotary settings of one kind of layer, old spelling or new, as one flat dict."""
    local = family.local_rope and kind == SLIDING
    theta = config["rope_local_base_freq"] if local else config["rope_theta"]
    old = {"rope_theta": theta, "partial_rotary_factor": config.get("partial_rotary_factor")}
    new = config.get("rope_parameters") or {}
    if kind in new or FULL in new or SLIDING in new:
        return {**old, **(new.get(kind) or {})}
    scaling = {} if local else {**(config.get("rope_scaling") or {}), **new}
    return {**old, **scaling}


def _rope(settings: Config, config: Config) -> RopeSpec:
    kind = settings.get("rope_type", settings.get("type", "default"))
    read = ROPE_KINDS.get(kind)
    if read is None:
        raise UnsupportedModel(f"rotary scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    if (settings.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not supported: heads are rotated whole")
    before = settings.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return read({**settings, "original_positions": before})


def _default_rope(settings: Config) -> RopeSpec:
    return RopeSpec("default", float(settings["rope_theta"]))


def _linear_rope(settings: Config) -> RopeSpec:
    return RopeSpec("linear", float(settings["rope_theta"]), float(settings["factor"]))


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


def _yarn_magnitude(settings: Config) -> float:
    """Equation 22 of arXiv 2309.00071, or the ratio of two of them, or what the config says."""
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0

    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    return growth(above) / growth(below) if above and below else growth(1.0)


ROPE_KINDS: Mapping[str, Callable[[Config], RopeSpec]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}
