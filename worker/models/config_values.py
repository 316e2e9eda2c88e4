"""Checks the types and ranges of the values in config.json before anything is computed from these values.

A value of null means "not stated" wherever a model family allows null. `check_values` accepts null for all settings
except those in REQUIRED.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.spec import PerLayerInputsSpec, RopeSpec

Config = Mapping[str, Any]
MAX_LAYERS, MAX_HEADS, MAX_SIZE = 4096, 4096, 1 << 20
MAX_VOCAB, MAX_POSITIONS, MAX_ID = 1 << 24, 1 << 27, (1 << 31) - 1
TINY, LARGE = 1e-9, 1e9  # limits of settings that are factors


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a setting may have. accepts: returns whether a value is allowed; expected: the allowed values in
    words
    """

    accepts: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def whole(low: int, high: int) -> Rule:
    """Returns a rule that accepts whole numbers from low to high."""
    return Rule(lambda value: _is_whole(value) and low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Rule:
    """Returns a rule that accepts numbers from low to high, hence only finite numbers."""
    return Rule(lambda value: _is_number(value) and low <= value <= high, f"a number from {low:g} to {high:g}")


def listed(each: Rule, most: int) -> Rule:
    """Returns a rule that accepts lists of at most `most` values."""
    return Rule(
        lambda value: isinstance(value, list | tuple) and len(value) <= most and all(map(each.accepts, value)),
        f"a list of at most {most} entries, each {each.expected}",
    )


def either(*rules: Rule) -> Rule:
    return Rule(
        lambda value: any(rule.accepts(value) for rule in rules), " or ".join(rule.expected for rule in rules)
    )  # fmt: skip


TEXT = Rule(lambda value: isinstance(value, str) and len(value) <= 100, "a text of at most 100 characters")
LETTERS = Rule(lambda value: isinstance(value, str) and len(value) <= MAX_LAYERS, f"at most {MAX_LAYERS} letters")
FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
OBJECT = Rule(lambda value: isinstance(value, dict), "an object")
IDS = whole(0, MAX_ID)
SIZE, SIZE_OR_ZERO, COUNT, HEADS = whole(1, MAX_SIZE), whole(0, MAX_SIZE), whole(0, MAX_LAYERS), whole(1, MAX_HEADS)
POSITIVE, FACTOR, RATIO, THETA = number(TINY, LARGE), number(-LARGE, LARGE), number(1e-3, 1e6), number(1, 1e15)
POSITIONS = Rule(
    lambda value: _is_number(value) and value == value // 1 and 1 <= value <= MAX_POSITIONS,
    f"a whole number from 1 to {MAX_POSITIONS}",
)
PER_LAYER = listed(whole(-MAX_SIZE, MAX_SIZE), MAX_LAYERS)
LAYERS = listed(whole(0, MAX_LAYERS - 1), MAX_LAYERS)
REQUIRED = (  # these settings may be left out where a family has a default, but must not be null
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "intermediate_size", "global_head_dim", "num_kv_shared_layers", "vocab_size_per_layer_input", "conv_L_cache",
    "block_ff_dim", "block_multiple_of", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
    "mamba_n_groups", "mamba_n_heads", "mamba_expand", "num_dense_layers", "routed_scaling_factor", "route_scale",
    "conv_kernel", "ssm_state_size", "mamba_head_dim", "mamba_num_heads", "n_groups", "mlp_hidden_act",
    "router_scaling_factor", *(f"moe_layer_{name}" for name in ("interval", "start_index", "end_index")),
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "scale_emb", "embedding_multiplier",
    "residual_multiplier",
)  # fmt: skip


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


OUTLINE = {  # the settings that are read before the family is known
    **_rows(TEXT, "model_type"), **_rows(OBJECT, "text_config vision_config"),
    **_rows(listed(TEXT, 64), "architectures"),
}  # fmt: skip
VALUES: Mapping[str, Rule] = {
    **OUTLINE,
    **_rows(whole(1, MAX_VOCAB), "vocab_size vocab_size_per_layer_input"),
    **_rows(whole(1, MAX_LAYERS), "num_hidden_layers"),
    **_rows(POSITIONS, "max_position_embeddings original_max_position_embeddings"),
    **_rows(SIZE, "hidden_size global_head_dim block_multiple_of mamba_expand"),
    **_rows(SIZE, "linear_key_head_dim linear_value_head_dim mamba_d_state linear_conv_kernel_dim mamba_d_conv"),
    **_rows(SIZE, "conv_L_cache"),
    **_rows(HEADS, "num_attention_heads linear_num_key_heads linear_num_value_heads mamba_n_heads mamba_n_groups"),
    **_rows(whole(0, MAX_HEADS), "num_key_value_heads num_global_key_value_heads"),
    **_rows(SIZE_OR_ZERO, "head_dim intermediate_size block_ff_dim shared_intermediate_size"),
    **_rows(either(SIZE_OR_ZERO, PER_LAYER), "moe_intermediate_size"),
    **_rows(SIZE_OR_ZERO, "shared_expert_intermediate_size hidden_size_per_layer_input"),
    **_rows(either(whole(-MAX_SIZE, MAX_SIZE), PER_LAYER), "num_experts"),
    **_rows(whole(-MAX_SIZE, MAX_SIZE), "num_local_experts num_experts_per_tok top_k_experts"),
    **_rows(whole(-MAX_SIZE, MAX_SIZE), "n_routed_experts"),
    **_rows(whole(0, 64), "n_shared_experts num_nextn_predict_layers num_shared_experts moe_num_shared_experts"),
    **_rows(whole(-MAX_SIZE, MAX_SIZE), "moe_k moe_num_experts"),
    **_rows(either(whole(-MAX_SIZE, MAX_SIZE), PER_LAYER), "moe_topk"),
    **_rows(whole(0, MAX_LAYERS), "moe_layer_start_index prefix_dense_sliding_window_pattern"),
    **_rows(whole(-1, MAX_LAYERS), "moe_layer_end_index"),
    **_rows(SIZE, "prefix_dense_intermediate_size"),
    **_rows(SIZE, "rotary_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim dim_model_base"),
    **_rows(whole(1, MAX_SIZE), "n_group topk_group"),
    **_rows(POSITIVE, "scale_emb scale_depth"),
    **_rows(either(SIZE, Rule(lambda value: value == "auto", "'auto'")), "mamba_d_head"),
    **_rows(whole(0, MAX_POSITIONS), "sliding_window"),
    **_rows(COUNT, "max_window_layers num_kv_shared_layers first_k_dense_replace num_dense_layers"),
    **_rows(whole(1, MAX_LAYERS), "no_rope_layer_interval moe_layer_interval global_attn_every_n_layers"),
    **_rows(either(whole(0, MAX_LAYERS), TEXT), "sliding_window_pattern"),  # beside a text there are layer_types
    **_rows(either(whole(0, MAX_LAYERS), FLAG), "decoder_sparse_step full_attention_interval"),
    **_rows(listed(TEXT, MAX_LAYERS), "layer_types mlp_layer_types layers_block_type"),
    **_rows(LETTERS, "hybrid_override_pattern"),
    **_rows(SIZE, "conv_kernel ssm_state_size mamba_head_dim moe_latent_size"),
    **_rows(HEADS, "mamba_num_heads n_groups"),
    **_rows(SIZE_OR_ZERO, "moe_shared_expert_intermediate_size"),
    **_rows(TEXT, "mlp_hidden_act mamba_hidden_act"),
    **_rows(FLAG, "residual_in_fp32 use_conv_bias mamba_proj_bias"),
    **_rows(LAYERS, "full_attn_idxs mlp_only_layers"),
    **_rows(listed(either(whole(0, 1), FLAG), MAX_LAYERS), "no_rope_layers"),
    **_rows(either(IDS, listed(IDS, 1024)), "eos_token_id"),
    **_rows(number(1e-30, 1), "rms_norm_eps layer_norm_eps norm_eps norm_epsilon layer_norm_epsilon"),
    **_rows(THETA, "rope_theta rope_local_base_freq"),
    **_rows(POSITIVE, "query_pre_attn_scalar attention_multiplier routed_scaling_factor"),
    **_rows(POSITIVE, "embedding_multiplier block_ffn_dim_multiplier route_scale router_scaling_factor"),
    **_rows(number(0, 1), "moe_norm_min"),
    **_rows(FACTOR, "residual_multiplier logits_scaling logit_scale"),
    **_rows(number(0, LARGE), "attn_logit_softcapping final_logit_softcapping"),
    **_rows(number(0, 1), "partial_rotary_factor"),
    **_rows(TEXT, "hidden_act hidden_activation dtype torch_dtype position_embedding_type topk_method"),
    **_rows(FLAG, "tie_word_embeddings tie_embedding attention_bias attention_out_bias mlp_bias use_bias qkv_bias"),
    **_rows(FLAG, "use_sliding_window norm_topk_prob enable_moe_block attention_k_eq_v use_double_wide_mlp"),
    **_rows(FLAG, "block_auto_adjust_ff_dim use_expert_bias use_qk_norm use_qkv_bias bias mup_enabled use_post_norm"),
    **_rows(FLAG, "use_parallel_residual qk_layernorm"),
    **_rows(TEXT, "expert_selection_fn shared_expert_combination_strategy"),
    **_rows(FLAG, "rope_interleave"),
    **_rows(OBJECT, "rope_parameters rope_scaling quantization_config per_layer_config"),
}  # fmt: skip
ROPE: Mapping[str, Rule] = {
    **_rows(TEXT, "rope_type type"),
    **_rows(THETA, "rope_theta"),
    **_rows(RATIO, "factor low_freq_factor high_freq_factor beta_fast beta_slow alpha"),
    **_rows(POSITIONS, "original_max_position_embeddings"),
    **_rows(number(0, 1e6), "mscale mscale_all_dim attention_factor llama_4_scaling_beta"),
    **_rows(number(0, 1), "partial_rotary_factor"),
    **_rows(FLAG, "truncate"),
    **_rows(listed(RATIO, MAX_SIZE), "short_factor long_factor"),
}  # fmt: skip


def check_outline(config: Config) -> None:
    """Checks the values that tell a config's model family. Raises UnsupportedModel if one is not allowed."""
    _check(config, OUTLINE)


def check_values(config: Config) -> None:
    """Checks the type and the range of every setting that is read. Raises UnsupportedModel if a value is not allowed.

    config: the settings of config.json, completed by the defaults of the family.
    """
    for name in REQUIRED:
        if name in config and config[name] is None:
            raise UnsupportedModel(f"{name} null is not supported; supported is {VALUES[name].expected}")
    _check(config, VALUES)


def checked_rope(settings: Config) -> Config:
    """Checks types and ranges of rotary settings, a flat dict, and returns the settings that are not null.

    Raises UnsupportedModel if a value is not allowed.
    """
    _check(settings, ROPE)
    return {name: value for name, value in settings.items() if value is not None}


def _check(config: Config, rules: Mapping[str, Rule]) -> None:
    for name, rule in rules.items():
        value = config.get(name)
        if value is not None and not rule.accepts(value):
            raise UnsupportedModel(f"{name} {shown(value)} is not supported; supported is {rule.expected}")


def single(config: Config, name: str) -> int:
    """Returns the value of the setting `name`; 0 for null. Raises UnsupportedModel for a list."""
    if isinstance(config[name], list | tuple):
        raise UnsupportedModel(f"{name} {shown(config[name])} is not supported in this family; supported is one number")
    return config[name] or 0


def counted(config: Config, name: str) -> int:
    """Returns the value of the setting `name`. Raises UnsupportedModel unless it is at least 1."""
    if single(config, name) < 1:
        raise UnsupportedModel(f"{name} {config[name]!r} is not supported; supported are numbers from 1 on")
    return int(config[name])


def shown(value: Any) -> str:
    """Returns a value as text for an error message. A long value is shortened."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict) and len(value) > 8:
        return f"with {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


# Makes a RopeSpec from the rotary settings of a Hugging Face config, given as one flat dict, for any model family.
#
# The defaults of each rotary kind equal the defaults in transformers.


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
    "mrope": _default_rope,  # text rotates by the default; only tokens of images differ (worker/vision/attention.py)
    "dynamic": _dynamic_rope,
    "linear": _linear_rope,
    "proportional": _proportional_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _longrope,
}


# Reads the settings in which layers of Gemma 4 differ from each other: heads, shared K/V, and the size of the MLP.

FULL = "full_attention"
OVERRIDES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}  # setting of a layer → field of LayerSpec


def gemma4_layers(config: Config, types: Sequence[str]) -> list[dict[str, Any]]:
    """Returns for each layer those fields of its LayerSpec that do not follow from its type alone.

    types: the types of all layers

    Raises UnsupportedModel if the settings contradict each other or are not supported.
    """
    count, overrides = len(types), _overrides(config, types)
    if types[-1] != FULL:
        raise UnsupportedModel(f"the last of layer_types is {types[-1]!r}; it must be {FULL}")
    own = count - config["num_kv_shared_layers"]
    if not 0 < own <= count or set(types) - set(types[:own]):
        raise UnsupportedModel(
            f"num_kv_shared_layers {config['num_kv_shared_layers']} of {count} layers is not supported: every type of "
            "layer needs one with K/V of its own"
        )
    layers = []
    for index, kind in enumerate(types):
        shares = None if index < own else max(other for other in range(own) if types[other] == kind)
        if shares is not None and overrides[index] != overrides[shares]:
            raise UnsupportedModel(
                f"per_layer_config: layer {index} shares the K/V of layer {shares}, whose heads are others"
            )
        wide = shares is not None and config["use_double_wide_mlp"]
        details: dict[str, Any] = {
            "shares": shares,
            "bidirectional": kind != FULL,
            "key_is_value": config["attention_k_eq_v"] and kind == FULL,
            "intermediate_size": 2 * config["intermediate_size"] if wide else 0,
        }
        layers.append(details | {field: overrides[index][name] for name, field in OVERRIDES.items()})
    return layers


def _overrides(config: Config, types: Sequence[str]) -> list[dict[str, int]]:
    """Returns the head size and the number of key heads of each layer.

    A config has common sizes for all layers, and states other sizes in one of two ways: for single layers in
    `per_layer_config`, or for all layers without a sliding window in `global_head_dim` and
    `num_global_key_value_heads`.
    """
    for name in OVERRIDES:
        if not config[name]:
            raise UnsupportedModel(f"{name} {config[name]!r} is not supported; supported are numbers from 1 on")
    plain = {name: int(config[name]) for name in OVERRIDES}
    full = plain | {"head_dim": int(config["global_head_dim"])}
    if config["attention_k_eq_v"] and config["num_global_key_value_heads"]:
        full["num_key_value_heads"] = int(config["num_global_key_value_heads"])
    stated = config.get("per_layer_config")
    if stated is None:
        return [full if kind == FULL else plain for kind in types]
    found = [dict(plain) for _ in types]
    for layer, settings in stated.items():
        if not isinstance(settings, dict) or any(not isinstance(size, int) or size < 1 for size in settings.values()):
            raise UnsupportedModel(f"per_layer_config {str(layer)[:80]} is not supported: it maps settings to sizes")
        unknown = settings.keys() - OVERRIDES.keys()
        if unknown or not str(layer).isdecimal() or int(layer) >= len(types):
            name = f"{layer}: {min(unknown)}" if unknown else str(layer)
            raise UnsupportedModel(f"per_layer_config {name} is not supported; supported are {', '.join(OVERRIDES)}")
        found[int(layer)] |= settings
    return found


def per_layer_inputs(config: Config) -> PerLayerInputsSpec | None:
    """Returns the sizes of per-layer embeddings; None if the model has none.

    Raises UnsupportedModel if the table has fewer rows than the vocabulary.
    """
    size, vocab = config["hidden_size_per_layer_input"], config["vocab_size_per_layer_input"]
    if not size:
        return None
    if vocab < config["vocab_size"]:
        raise UnsupportedModel(f"vocab_size_per_layer_input {vocab} is not supported: it is less than vocab_size")
    return PerLayerInputsSpec(vocab, size)
