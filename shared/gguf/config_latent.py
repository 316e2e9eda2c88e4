"""The parts of config.json of models with multi-head latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash, Kimi K2."""

from shared.gguf.config_dense import has_bias
from shared.gguf.config_moe import SIGMOID, SOFTMAX, experts
from shared.gguf.config_values import Config, Hyperparameters, rope_scaling
from shared.gguf.naming import GgufError

LENGTHS = ("key_length", "value_length")


def latent_sizes(values: Hyperparameters) -> Config:
    """Returns the sizes of attention. Files say them in one of two ways.

    Newer files describe what is cached: one K/V head, as long as a cached row, and the lengths of a head's query and
    value have other names. Older files describe the heads.
    """
    heads, rank = values.integer("attention.head_count"), values.integer("attention.kv_lora_rank")
    rope, cached = values.integer("rope.dimension_count"), values.integer("attention.head_count_kv", 1) == 1
    query, value = (
        values.integer(f"attention.{name}_mla" if cached else f"attention.{name}", 0 if cached else None)
        for name in LENGTHS
    )
    if cached and query and value:
        for name, size in zip(LENGTHS, (rank + rope, rank), strict=True):
            values.expect(f"attention.{name}", size)
    elif cached:  # a model of one head may be described in the older way
        values.expect("attention.head_count", 1)
        query, value = (values.integer(f"attention.{name}") for name in LENGTHS)
    else:
        values.expect("attention.head_count_kv", heads)
    if query <= rope:
        raise GgufError(f"{values.container.name} rotates {rope} of {query} dimensions of a query")
    return {
        "head_dim": rank + rope,
        "num_key_value_heads": 1,
        "q_lora_rank": values.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": query - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "intermediate_size": values.integer("feed_forward_length"),
        "rope_scaling": _scaling(values, rope),
    }


def _scaling(values: Hyperparameters, rope: int) -> Config | None:
    """Returns the rotary scaling. With YaRN, queries and keys grow only by a factor that the file states."""
    scaling = rope_scaling(values, rope)
    growth = round(10 * values.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
    if scaling is None or scaling["rope_type"] != "yarn":
        return scaling
    return {**scaling, "attention_factor": 1.0, **({"mscale_all_dim": growth} if growth else {})}


def deepseek2(values: Hyperparameters, config: Config) -> Config:
    """DeepSeek-V2 and V3, and models with the same layers. How the router scores experts tells which of the two."""
    gating = values.integer("expert_gating_func", SOFTMAX) or SOFTMAX
    scale = values.number("expert_weights_scale", 1.0) or 1.0
    normalized = bool(values.container.metadata.get(values.key("expert_weights_norm"), False))
    groups, of_groups = (values.integer(f"expert_group_{name}", 1) or 1 for name in ("count", "used_count"))
    chosen = experts(values, "n_routed_experts", normalized=normalized, gating=gating, scale=scale)
    if gating not in (SOFTMAX, SIGMOID):
        raise GgufError(f"{values.container.name}: {values.key('expert_gating_func')} {gating} is not supported")
    if gating == SIGMOID:
        kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    else:
        kind = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return chosen | kind | {
        "n_group": groups,
        "topk_group": of_groups,
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "n_shared_experts": values.integer("expert_shared_count", 0),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": scale,
        "norm_topk_prob": normalized,
        "num_nextn_predict_layers": 0,
        "attention_bias": has_bias(values, "attn_kv_a_mqa"),
    }  # fmt: skip
