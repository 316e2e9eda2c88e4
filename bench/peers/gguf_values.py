"""Writes the hyperparameters that llama.cpp's converter writes, from a config.json of transformers 5."""

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Config = Mapping[str, Any]

SCALINGS = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
# The converter writes no head size for these model types.
WITHOUT_HEAD_DIM = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "olmo2", "olmoe")
WITH_PATTERN = ("olmo3", "exaone4", "gemma4_text")  # for these, the converter writes which layers have a window
EPSILONS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
}
WITHOUT_WINDOW = ("starcoder2",)  # for these, the converter writes no window


def hyperparameters(writer: gguf.GGUFWriter, config: Config) -> None:
    """Writes the hyperparameters in config.json as GGUF metadata."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    if of_layer_norms := EPSILONS.get(config["model_type"]):
        writer.add_layer_norm_eps(config[of_layer_norms])
    else:
        writer.add_layer_norm_rms_eps(config["norm_eps"] if "norm_eps" in config else config["rms_norm_eps"])
    if config["model_type"] == "gemma4_text":
        _gemma4(writer, config)
    elif config.get("kv_lora_rank"):
        _latent(writer, config)
    else:
        _same_in_all_layers(writer, config, head_dim)
    _windows(writer, config)
    _experts(writer, config)
    if config.get("linear_num_key_heads"):
        _recurrent(writer, config)
    if config.get("mamba_n_heads"):
        _mamba(writer, config)
    for name, write in OF_FAMILIES.items():
        if config.get(name) is not None:
            write(writer, config[name])


def _same_in_all_layers(writer: gguf.GGUFWriter, config: Config, head_dim: int) -> None:
    kv_heads = config["num_key_value_heads"]
    if config.get("conv_L_cache"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config.get("conv_L_cache") or config.get("mamba_n_heads"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    if config["model_type"] not in WITHOUT_HEAD_DIM:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _rotary(writer, config["rope_parameters"], head_dim)


OF_FAMILIES: Mapping[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "attn_logit_softcapping": gguf.GGUFWriter.add_attn_logit_softcapping,
    "final_logit_softcapping": gguf.GGUFWriter.add_final_logit_softcapping,
    "attention_multiplier": gguf.GGUFWriter.add_attention_scale,
    "embedding_multiplier": gguf.GGUFWriter.add_embedding_scale,
    "residual_multiplier": gguf.GGUFWriter.add_residual_scale,
    "logits_scaling": gguf.GGUFWriter.add_logit_scale,
    "logit_scale": gguf.GGUFWriter.add_logit_scale,
}


def _rotary(writer: gguf.GGUFWriter, by_kind: Config, head_dim: int) -> None:
    rope = by_kind.get("full_attention", by_kind)
    kind = rope.get("rope_type")
    writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2)))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if "sliding_attention" in by_kind:
        writer.add_rope_freq_base_swa(by_kind["sliding_attention"]["rope_theta"])
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if kind in SCALINGS:
        writer.add_rope_scaling_type(SCALINGS[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        _yarn(writer, rope)


def _gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    types, shared = config["layer_types"], config["num_kv_shared_layers"]
    full = next(iter(config["per_layer_config"].values()))
    kv_heads, inner = config["num_key_value_heads"], config["intermediate_size"]
    if "num_key_value_heads" in full:
        kv_heads = [full["num_key_value_heads"] if kind == "full_attention" else kv_heads for kind in types]
    if config["use_double_wide_mlp"]:
        inner = [inner] * (len(types) - shared) + [2 * inner] * shared
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(inner)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    for add, size in (
        (writer.add_key_length, full["head_dim"]),
        (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count, full["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add(size)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def _latent(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    scaling = config["rope_parameters"]
    _rotary(writer, {**scaling, "partial_rotary_factor": 1.0}, rope)
    if scaling.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def rotary_factors(config: Config) -> npt.NDArray[np.float32]:
    """Returns the divisors of the rotary frequencies in Gemma 4's layers without a window. A pair with the divisor 1e30
    is not rotated."""
    half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    rotated = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)


def _yarn(writer: gguf.GGUFWriter, rope: Config) -> None:
    if rope.get("attention_factor"):
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _windows(writer: gguf.GGUFWriter, config: Config) -> None:
    types = config.get("layer_types", ["sliding_attention"])
    if "sliding_attention" in types and config["model_type"] not in WITHOUT_WINDOW and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if config["model_type"] in WITH_PATTERN:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])


def _experts_of_ernie(writer: gguf.GGUFWriter, config: Config) -> None:
    size, shared = config["moe_intermediate_size"], config["moe_num_shared_experts"]
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_expert_feed_forward_length(size)
    writer.add_expert_shared_count(shared)
    writer.add_expert_shared_feed_forward_length(shared * size)
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])


def _experts(writer: gguf.GGUFWriter, config: Config) -> None:
    if config["model_type"] == "ernie4_5_moe":
        _experts_of_ernie(writer, config)
        return
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    size = config["intermediate_size"] if config["model_type"] == "gpt_oss" else config.get("moe_intermediate_size")
    if size:
        writer.add_expert_feed_forward_length(size)
    if shared := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.get("n_routed_experts"):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        softmax = config["model_type"] == "deepseek_v2"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
        if (config.get("n_group") or 1) > 1:
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _recurrent(writer: gguf.GGUFWriter, config: Config) -> None:
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size)
    writer.add_full_attention_interval(1 + config["layer_types"].index("full_attention"))


def _mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
