"""Checks the types and ranges of the values in config.json before anything is computed from these values.

A value of null means "not stated" wherever a model family allows null. `check_values` accepts null for all settings
except those in REQUIRED.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker.model.checkpoint.checkpoint import UnsupportedModel

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
FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
OBJECT = Rule(lambda value: isinstance(value, dict), "an object")
IDS = whole(0, MAX_ID)
SIZE, SIZE_OR_ZERO, COUNT, HEADS = whole(1, MAX_SIZE), whole(0, MAX_SIZE), whole(0, MAX_LAYERS), whole(1, MAX_HEADS)
POSITIVE, FACTOR, RATIO, THETA = number(TINY, LARGE), number(-LARGE, LARGE), number(1e-3, 1e6), number(1, 1e15)
POSITIONS = Rule(
    lambda value: _is_number(value) and value == value // 1 and 1 <= value <= MAX_POSITIONS,
    f"a whole number from 1 to {MAX_POSITIONS}",
)
LAYERS = listed(whole(0, MAX_LAYERS - 1), MAX_LAYERS)
REQUIRED = (  # these settings may be left out where a family has a default, but must not be null
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "intermediate_size", "global_head_dim", "num_kv_shared_layers", "vocab_size_per_layer_input", "conv_L_cache",
    "block_ff_dim", "block_multiple_of", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
    "mamba_n_groups", "mamba_n_heads", "mamba_expand", "num_dense_layers", "routed_scaling_factor",
)  # fmt: skip


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


OUTLINE = {  # the settings that are read before the family is known
    **_rows(TEXT, "model_type"), **_rows(OBJECT, "text_config"), **_rows(listed(TEXT, 64), "architectures"),
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
    **_rows(SIZE_OR_ZERO, "head_dim intermediate_size block_ff_dim moe_intermediate_size shared_intermediate_size"),
    **_rows(SIZE_OR_ZERO, "shared_expert_intermediate_size hidden_size_per_layer_input"),
    **_rows(whole(-MAX_SIZE, MAX_SIZE), "num_experts num_local_experts num_experts_per_tok top_k_experts"),
    **_rows(whole(-MAX_SIZE, MAX_SIZE), "n_routed_experts"),
    **_rows(whole(0, 64), "n_shared_experts num_nextn_predict_layers"),
    **_rows(SIZE, "rotary_dim"),
    **_rows(either(SIZE, Rule(lambda value: value == "auto", "'auto'")), "mamba_d_head"),
    **_rows(whole(0, MAX_POSITIONS), "sliding_window"),
    **_rows(COUNT, "max_window_layers num_kv_shared_layers first_k_dense_replace num_dense_layers"),
    **_rows(whole(1, MAX_LAYERS), "sliding_window_pattern no_rope_layer_interval"),
    **_rows(either(whole(0, MAX_LAYERS), FLAG), "decoder_sparse_step full_attention_interval"),
    **_rows(listed(TEXT, MAX_LAYERS), "layer_types"),
    **_rows(LAYERS, "full_attn_idxs mlp_only_layers"),
    **_rows(listed(either(whole(0, 1), FLAG), MAX_LAYERS), "no_rope_layers"),
    **_rows(either(IDS, listed(IDS, 1024)), "eos_token_id"),
    **_rows(number(1e-30, 1), "rms_norm_eps layer_norm_eps norm_eps norm_epsilon"),
    **_rows(THETA, "rope_theta rope_local_base_freq"),
    **_rows(POSITIVE, "query_pre_attn_scalar attention_multiplier routed_scaling_factor"),
    **_rows(POSITIVE, "embedding_multiplier block_ffn_dim_multiplier"),
    **_rows(FACTOR, "residual_multiplier logits_scaling logit_scale"),
    **_rows(number(0, LARGE), "attn_logit_softcapping final_logit_softcapping"),
    **_rows(number(0, 1), "partial_rotary_factor"),
    **_rows(TEXT, "hidden_act hidden_activation dtype torch_dtype position_embedding_type"),
    **_rows(FLAG, "tie_word_embeddings tie_embedding attention_bias attention_out_bias mlp_bias use_bias qkv_bias"),
    **_rows(FLAG, "use_sliding_window norm_topk_prob enable_moe_block attention_k_eq_v use_double_wide_mlp"),
    **_rows(FLAG, "block_auto_adjust_ff_dim use_expert_bias use_qk_norm"),
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


def counted(config: Config, name: str) -> int:
    """Returns the value of the setting `name`. Raises UnsupportedModel unless it is at least 1."""
    if not config[name] or config[name] < 1:
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
