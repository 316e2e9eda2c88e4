"""The parts of config.json that mixtures of experts, hybrids (DeltaNet, Mamba-2, convolutions) and Gemma 4 have."""

from functools import partial

from shared.gguf.config_dense import (
    factors_of_granite,
    granite_factors,
    has_bias,
    mrope_sections,
    part_of_heads,
    qwen_vl,
    same_in_all_layers,
    whole_heads,
)
from shared.gguf.config_values import FULL, ROPE_FREQS, SLIDING, Config, Hyperparameters, rope_scaling, windows
from shared.gguf.container import Container
from shared.gguf.naming import GgufError

FULL_EVERY_NTH = 4
SIZES = {  # name in GGUF → name in config.json
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
}  # fmt: skip


def qwen3_5(values: Hyperparameters, config: Config) -> Config:
    return _recurrent(values, config) | mrope_sections(values, config)


def qwen3_5_moe(values: Hyperparameters, config: Config) -> Config:
    return qwen3_5(values, config) | qwen_experts(values, normalized=True) | shared_expert(values, config)


def qwen3_next(values: Hyperparameters, config: Config) -> Config:
    return _recurrent(values, config) | qwen_experts(values, normalized=True) | shared_expert(values, config)


def _recurrent(values: Hyperparameters, config: Config) -> Config:
    sizes = {name: values.integer(stored) for stored, name in SIZES.items()}
    values_size, heads = values.integer("ssm.inner_size"), sizes["linear_num_value_heads"]
    if heads < 1 or values_size % heads:
        name = values.key("ssm.inner_size")
        raise GgufError(f"{values.container.name}: {name} {values_size} cannot be divided by {heads} heads")
    return part_of_heads(values, config) | sizes | {
        "linear_value_head_dim": values_size // heads,
        "layer_types": _layer_types(values, config["num_hidden_layers"]),
        "attention_bias": has_bias(values, "attn_q"),
    }  # fmt: skip


def _layer_types(values: Hyperparameters, layers: int) -> list[str]:
    nth = values.integer("full_attention_interval", FULL_EVERY_NTH)
    if nth < 1:
        raise GgufError(
            f"{values.container.name}: {values.key('full_attention_interval')} is {nth}, not a number from 1 on"
        )
    every = [bool((i + 1) % nth) for i in range(values.integer("block_count"))]
    recurrent = values.container.entries(values.key("attention.recurrent_layers"), bool | int, every)
    if len(recurrent) < layers:
        raise GgufError(
            f"{values.container.name}: {len(recurrent)} of its {layers} layers say whether they are recurrent"
        )
    return ["linear_attention" if one else "full_attention" for one in recurrent[:layers]]


def sizes_by_layer(values: Hyperparameters, recurrent: str) -> Config:
    """Finds recurrent layers in files that state key heads layer by layer: a recurrent layer has no key heads.

    recurrent: the type of recurrent layers in config.json.
    """
    container, key = values.container, values.key("attention.head_count_kv")
    heads = container.entries(key, int)
    attending = {count for count in heads if count}
    if len(heads) != values.integer("block_count") or len(attending) != 1:
        raise GgufError(f"{container.name}: {key} {heads} must be 0 or the same number for every layer")
    stated = {**container.metadata, key: attending.pop()}
    same = Hyperparameters(Container(container.name, stated, container.tensors), values.architecture, values.seen)
    kinds = ["full_attention" if count else recurrent for count in heads]
    return same_in_all_layers(same) | {"layer_types": kinds}


sizes_of_lfm2 = partial(sizes_by_layer, recurrent="conv")
sizes_of_granite = partial(sizes_by_layer, recurrent="linear_attention")


def granite_hybrid(values: Hyperparameters, config: Config) -> Config:
    """Granite 4. The value `finetuned` in its file says whether queries and keys are rotated."""
    values.seen.add("rope.scaling.finetuned")
    rotated = values.container.flag(values.key("rope.scaling.finetuned"), True)
    inner, heads = values.integer("ssm.inner_size"), values.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads or inner % config["hidden_size"]:
        raise GgufError(f"{values.container.name}: {values.key('ssm.inner_size')} {inner} does not fit the rest of it")
    size = config["intermediate_size"]
    chosen = {"num_local_experts": 0, "num_experts_per_tok": 0}
    if values.integer("expert_count", 0):
        chosen = experts(values, "num_local_experts", normalized=True)
        size = values.integer("expert_shared_feed_forward_length")
    values.expect("expert_shared_feed_forward_length", size)
    return whole_heads(values, config) | granite_factors(values, config) | chosen | {
        "attention_bias": has_bias(values, "attn_q"),
        "position_embedding_type": "rope" if rotated else None,
        "shared_intermediate_size": size,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": values.integer("ssm.group_count"),
        "mamba_d_state": values.integer("ssm.state_size"),
        "mamba_d_conv": values.integer("ssm.conv_kernel"),
        "mamba_expand": inner // config["hidden_size"],
    }  # fmt: skip


def lfm2(values: Hyperparameters, config: Config) -> Config:
    """LFM2. The file has the final feed-forward size, so the config switches the family's adjustment of it off."""
    return whole_heads(values, config) | {
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


# Makes the part of config.json that only models with experts have.

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
    """Granite MoE, which has a shared expert if the file states its size."""
    found = experts(values, "num_local_experts", normalized=True)
    if shared := values.integer("expert_shared_feed_forward_length", 0):
        names = {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
        found |= names | {"shared_intermediate_size": shared}
    return whole_heads(values, config) | _same_size(values, config) | factors_of_granite(values, config) | found


def ernie_moe(values: Hyperparameters, config: Config) -> Config:
    """ERNIE 4.5 with experts, of which a softmax and a bias choose. The last layer has experts."""
    found = experts(values, "moe_num_experts", normalized=True)
    size, count = values.integer("expert_feed_forward_length"), values.integer("expert_shared_count", 0)
    values.key("expert_shared_feed_forward_length")  # without shared experts, its value means nothing
    if count:
        values.expect("expert_shared_feed_forward_length", count * size)
    return whole_heads(values, config) | {
        "moe_num_experts": found["moe_num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": size,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": values.integer("leading_dense_block_count", 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": values.integer("interleave_moe_layer_step", 1),
    }


def _same_size(values: Hyperparameters, config: Config) -> Config:
    """Checks a config whose `intermediate_size` is the size of one expert."""
    values.expect("expert_feed_forward_length", config["intermediate_size"])
    return {}


# Makes the part of config.json that only Gemma 4 has.
#
# Sizes differ between layers, layers share K/V, and each layer has its own token embeddings; some models have
# experts.

PATTERN = 6  # n: every n-th layer attends to all positions, the other layers have a window
NOT_ROTATED = 1e30  # a divisor of frequencies so large that a pair is not rotated


def sizes(values: Hyperparameters) -> Config:
    """Returns the head and feed-forward sizes of the layers with a window."""
    head_dim = values.integer("attention.key_length_swa", values.integer("attention.key_length"))
    values.expect("attention.value_length_swa", head_dim)
    kv_heads, inner = _by_layer(values, "attention.head_count_kv"), _by_layer(values, "feed_forward_length")
    return {"head_dim": head_dim, "num_key_value_heads": kv_heads[0], "intermediate_size": inner[0]}


def extra(values: Hyperparameters, config: Config) -> Config:
    container, size = values.container, values.integer("embedding_length_per_layer_input", 0)
    table = container.tensors.get("per_layer_token_embd.weight")
    found = windows(values, config, PATTERN)
    types, shared = found["layer_types"], values.integer("attention.shared_kv_layers", 0)
    own = [i for i, kind in enumerate(types) if kind == FULL and i < len(types) - shared]
    return found | {
        "per_layer_config": _of_full_layers(values, config, types),
        "rope_parameters": _rotary(values, config),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_wide(values, config, shared),
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in container.tensors for i in own),
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": values.number("final_logit_softcapping", 0.0) or None,
        **(_experts(values) if values.integer("expert_count", 0) else {"num_experts": None, "top_k_experts": None}),
    }


def _by_layer(values: Hyperparameters, name: str) -> list[int]:
    """Returns a list with a value for each layer; the file may state one value for all layers."""
    layers, found = values.integer("block_count"), values.container.metadata.get(values.key(name))
    if not isinstance(found, list):
        return [values.integer(name)] * layers
    if len(found) != layers or not all(isinstance(one, int) and one > 0 for one in found):
        raise GgufError(f"{values.container.name}: {values.key(name)} must have a whole number for each layer")
    return found


def _of_full_layers(values: Hyperparameters, config: Config, types: list[str]) -> Config:
    """Returns layer number → number of heads, for the layers that attend to all positions."""
    head_dim, kv_heads = values.integer("attention.key_length"), _by_layer(values, "attention.head_count_kv")
    values.expect("attention.value_length", head_dim)
    if any(heads != config["num_key_value_heads"] for i, heads in enumerate(kv_heads) if types[i] == SLIDING):
        raise GgufError(f"{values.container.name}: layers with a window have different numbers of key heads")
    full = [i for i, kind in enumerate(types) if kind == FULL]
    return {str(i): {"head_dim": head_dim, "num_key_value_heads": kv_heads[i]} for i in full}


def _is_wide(values: Hyperparameters, config: Config, shared: int) -> bool:
    """Whether the MLPs of layers that share K/V are twice as wide as the MLPs of the other layers."""
    inner, one = _by_layer(values, "feed_forward_length"), config["intermediate_size"]
    own = len(inner) - shared
    wide = bool(inner[own:]) and inner[-1] == 2 * one
    if inner != [one] * own + [2 * one if wide else one] * shared:
        raise GgufError(f"{values.container.name}: {values.key('feed_forward_length')} {inner} is not supported")
    return wide


def _rotary(values: Hyperparameters, config: Config) -> Config:
    """Returns rotary settings by kind of layer. In layers without a window, a tensor says which pairs rotate."""
    head_dim, name = values.integer("attention.key_length"), values.container.name
    values.expect("rope.dimension_count", head_dim)
    values.expect("rope.dimension_count_swa", config["head_dim"])
    if values.text("rope.scaling.type", "none") != "none":
        raise GgufError(f"{name}: rotary scaling is not supported in Gemma 4")
    tensor = values.container.tensors.get(ROPE_FREQS)
    if tensor is None or tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise GgufError(f"{name}: {ROPE_FREQS} is missing, or does not fit the rest of the file")
    factors = tensor.floats()
    rotated = sum(factor == 1 for factor in factors)
    if any(factor < 0.9 * NOT_ROTATED for factor in factors[rotated:]) or not all(f == 1 for f in factors[:rotated]):
        raise GgufError(f"{name}: {ROPE_FREQS} has other factors than 1, and {NOT_ROTATED:g} for pairs not rotated")
    local = values.number("rope.freq_base_swa", 10_000.0)
    part = 2 * rotated / head_dim
    return {
        FULL: {"rope_type": "proportional", "rope_theta": config["rope_theta"], "partial_rotary_factor": part},
        SLIDING: {"rope_type": "default", "rope_theta": local},
    }


def _experts(values: Hyperparameters) -> Config:
    found = experts(values, "num_experts", normalized=True)
    return {
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
    }


# The parts of config.json of models with multi-head latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash, Kimi K2.

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
