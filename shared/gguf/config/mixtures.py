"""Makes the part of config.json that only models with experts have."""

from shared.gguf.config.dense import factors_of_granite, has_bias, part_of_heads, qwen_vl, whole_heads
from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.config.windows import windows
from shared.gguf.errors import GgufError

GPT_OSS_PATTERN = 2  # n: every n-th layer attends to all positions, the other layers have a window
# Values of expert_gating_func, which says how the weights of a row's experts are computed.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


def llama(values: Hyperparameters, config: Config) -> Config:
    """Llama, and the Mistral models that llama.cpp names llama: a window means Mistral, experts mean Mixtral."""
    window = values.integer("attention.sliding_window", 0)
    mistral = {"model_type": "mistral", "sliding_window": window} if window else {}
    bias = {"attention_bias": has_bias(values, "attn_q"), "mlp_bias": has_bias(values, "ffn_down")}
    mixtral = _mixtral(values, window) if values.integer("expert_count", 0) else {}
    return whole_heads(values, config) | bias | mistral | mixtral


def _mixtral(values: Hyperparameters, window: int) -> Config:
    names = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": window or None}
    return names | experts(values, "num_local_experts", normalized=True)


def qwen3_moe(values: Hyperparameters, config: Config) -> Config:
    return whole_heads(values, config) | qwen_experts(values, normalized=True)


def qwen3_vl_moe(values: Hyperparameters, config: Config) -> Config:
    return qwen_vl(values, config) | qwen_experts(values, normalized=True)


def qwen2_moe(values: Hyperparameters, config: Config) -> Config:
    return whole_heads(values, config) | qwen_experts(values, normalized=False) | shared_expert(values, config)


def qwen_experts(values: Hyperparameters, *, normalized: bool) -> Config:
    """Returns the values of a model with experts in every layer. Old files do not store the size of an expert."""
    found = experts(values, "num_experts", normalized=normalized)
    dense = values.integer("feed_forward_length", 0)
    size = values.integer("expert_feed_forward_length", dense // found["num_experts_per_tok"] or None)
    return found | {
        "moe_intermediate_size": size, "norm_topk_prob": normalized, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def shared_expert(values: Hyperparameters, config: Config) -> Config:
    size = values.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    return {"shared_expert_intermediate_size": size}


def experts(values: Hyperparameters, name: str, *, normalized: bool, gating: int = SOFTMAX, scale: float = 1) -> Config:
    """Returns the number of experts, under the key `name`, and the number that a row chooses.

    normalized, gating, scale: values that llama.cpp builds into the architecture; scale multiplies the experts' sum.
    """
    values.expect("expert_weights_scale", scale)
    values.expect("expert_gating_func", gating)
    values.expect("expert_weights_norm", normalized)
    count, chosen = values.integer("expert_count"), values.integer("expert_used_count")
    if not 1 <= chosen <= count:
        raise GgufError(f"{values.container.name} describes rows that choose {chosen} of {count} experts")
    return {name: count, "num_experts_per_tok": chosen}


def gpt_oss(values: Hyperparameters, config: Config) -> Config:
    """gpt-oss. Its YaRN does not round the ends of the ramp to whole dimensions, which no value of the file states."""
    values.expect("rope.freq_base_swa", config["rope_theta"])
    scaling = config["rope_scaling"]
    return whole_heads(values, config) | {
        **experts(values, "num_local_experts", normalized=True, gating=SOFTMAX_OF_CHOSEN),
        **windows(values, config, GPT_OSS_PATTERN),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "attention_bias": True,
        "rope_scaling": scaling and scaling | {"truncate": False},
    }


def glm4_moe(values: Hyperparameters, config: Config) -> Config:
    """GLM-4.5 to 4.7. The first layers have no experts."""
    scale = values.number("expert_weights_scale", 1.0)
    normalized = bool(values.container.metadata.get(values.key("expert_weights_norm"), True))
    for groups in ("expert_group_count", "expert_group_used_count"):
        values.expect(groups, 1)
    return part_of_heads(values, config) | {
        **experts(values, "n_routed_experts", normalized=normalized, gating=SIGMOID, scale=scale),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "n_shared_experts": values.integer("expert_shared_count", 1),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 1),
        "routed_scaling_factor": scale,
        "norm_topk_prob": normalized,
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in values.container.tensors),
        "attention_bias": has_bias(values, "attn_q"),
    }


def olmoe(values: Hyperparameters, config: Config) -> Config:
    found = experts(values, "num_experts", normalized=False)
    return whole_heads(values, config) | _same_size(values, config) | found | {"norm_topk_prob": False}


def granite_moe(values: Hyperparameters, config: Config) -> Config:
    found = experts(values, "num_local_experts", normalized=True)
    return whole_heads(values, config) | _same_size(values, config) | factors_of_granite(values, config) | found


def _same_size(values: Hyperparameters, config: Config) -> Config:
    """Checks a config whose `intermediate_size` is the size of one expert."""
    values.expect("expert_feed_forward_length", config["intermediate_size"])
    return {}
