"""The supported model families. Each is a row of defaults and switches, from which config.py makes a ModelSpec."""

from collections.abc import Mapping
from dataclasses import replace

from worker.models.config_values import gemma4_layers
from worker.models.family import (
    CONV,
    LINEAR,
    Family,
    FamilyExperts,
    Recurrence,
    afmoe_spec,
    always,
    always_biased,
    as_attention_bias_without_output,
    as_either_name,
    as_qkv_bias,
    as_two_settings,
    as_use_bias,
    as_use_expert_bias,
    as_use_qkv_bias,
    clova_spec,
    cohere2_moe_settings,
    cohere2_moe_spec,
    conv_but_listed,
    deepseek_v2_settings,
    ernie_moe_settings,
    every_layer_sparse,
    full_every_nth,
    granite_hybrid_settings,
    hunyuan_moe_settings,
    lfm2_sizes,
    minicpm3_settings,
    never,
    never_rotates,
    rotated_part,
    rotates_but_every_nth,
    rotates_if_stated,
    rotates_where_windowed,
    rotates_where_windowed_by_type,
    rotates_where_windowed_or_dense,
    scaled_by_heads,
    shared_expert_size,
    sparse_after_dense_layers,
    sparse_after_first,
    sparse_as_listed,
    sparse_by_step,
    sparse_if_enabled,
    sparse_if_there_are_experts,
    sparse_in_range,
    stablelm_spec,
    tanh_gelu,
    window_but_every_nth,
    window_but_every_nth_after_dense,
    window_but_every_nth_from_first,
    window_but_every_sixth_and_last,
    window_everywhere,
    window_everywhere_if_used,
    window_from_layer,
    window_in_every_other,
    window_in_every_other_first,
    window_where_nothing_rotates,
)
from worker.models.single_blocks import settings as single_block_settings
from worker.models.single_blocks import without_mlp

# The defaults of the model families' settings.
#
# They equal the defaults of the config classes in transformers, because config.json may omit a setting whose value is
# the default.

COMMON = {
    "head_dim": None, "num_key_value_heads": None, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10_000.0, "eos_token_id": (), "tie_word_embeddings": False, "hidden_act": "silu", "logit_scale": 1.0,
}  # fmt: skip
PHI3 = {
    "vocab_size": 32_064, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32_000,
}  # fmt: skip
SMOLLM3 = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
    "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
    "eos_token_id": 128_001, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32_768,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
GEMMA2 = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "eos_token_id": 1, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "eos_token_id": 1,
    "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}  # fmt: skip
GEMMA4 = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "eos_token_id": 1, "tie_word_embeddings": True, "rope_parameters": GEMMA4_ROPE, "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 1, "global_head_dim": 512,
    "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
}  # fmt: skip
GEMMA4_UNIFIED = {
    **GEMMA4, "max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
}  # fmt: skip
QWEN_EXPERTS = {
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None, "max_position_embeddings": 32_768,
    "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 24, "use_sliding_window": False,
    "sliding_window": 4096,
}  # fmt: skip
QWEN2_MOE = {
    **QWEN_EXPERTS, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": True,
    "max_window_layers": 28, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN_EXPERTS, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
}  # fmt: skip
DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "hidden_size": 2048,
    "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512,
}  # fmt: skip
QWEN3_5 = {
    **DELTA_NET, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
QWEN3_5_MOE = {
    **DELTA_NET, "vocab_size": 248_320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256,
    "intermediate_size": 0,  # no layer is dense
}  # fmt: skip
QWEN3_NEXT = {
    **DELTA_NET, "vocab_size": 151_936, "num_hidden_layers": 48, "num_experts_per_tok": 10, "num_experts": 512,
    "intermediate_size": 5632, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0, "sliding_window": None, "eos_token_id": 2, "num_experts_per_tok": 2, "num_experts": 8,
}  # fmt: skip
GPT_OSS = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4,
    "num_experts": 128,
}  # fmt: skip
OLMOE = {
    "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50_279,
    "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip
OLMO = {
    "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50_279,
}  # fmt: skip
GLM4 = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5,
    "eos_token_id": [151_329, 151_336, 151_338],
}  # fmt: skip
GRANITE = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "eos_token_id": 2, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
GRANITE_MOE = {**GRANITE, "num_experts_per_tok": 2, "num_experts": 8}
GRANITE_HYBRID = {
    **GRANITE, "num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 1024, "layer_types": None,
    "position_embedding_type": None, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": None,
}  # fmt: skip
MINISTRAL3 = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_theta": 1_000_000.0, "sliding_window": None,
}  # fmt: skip
MINISTRAL3_SCALING = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
SEED_OSS = {
    "vocab_size": 155_136, "hidden_size": 4096, "intermediate_size": 27_648, "num_hidden_layers": 64,
    "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288,
    "attention_bias": True, "attention_out_bias": False, "eos_token_id": 2,
}  # fmt: skip
ERNIE = {
    "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "use_bias": False, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
EXAONE4 = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None, "eos_token_id": 2,
}  # fmt: skip
COHERE = {
    "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    "eos_token_id": 255_001, "tie_word_embeddings": True,
}  # fmt: skip
STARCODER2 = {
    "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True, "eos_token_id": 50_256,
    "tie_word_embeddings": True,
}  # fmt: skip
HUNYUAN = {
    "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
APERTUS = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "hidden_act": "xielu",
    "rope_theta": 12_000_000.0, "eos_token_id": 2,
}  # fmt: skip
APERTUS_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
NEMOTRON = {
    "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576, "num_hidden_layers": 32,
    "num_attention_heads": 48, "max_position_embeddings": 4096, "norm_eps": 1e-5, "hidden_act": "relu2",
    "partial_rotary_factor": 0.5, "eos_token_id": 3,
}  # fmt: skip
ARCEE = {
    "vocab_size": 32_000, "hidden_size": 2560, "intermediate_size": 18_432, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2",
    "eos_token_id": 128_001,
}  # fmt: skip
LFM2 = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0, "conv_L_cache": 3, "full_attn_idxs": None, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if not name.startswith("block_")},
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
GLM4_MOE = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "use_qk_norm": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
DOTS1 = {
    "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096,
    "max_window_layers": 62, "use_sliding_window": True, "moe_intermediate_size": 1408, "num_experts_per_tok": None,
    "n_shared_experts": None, "n_routed_experts": None, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}  # fmt: skip
MINIMAX_M2 = {
    "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0, "rotary_dim": None, "partial_rotary_factor": None, "num_experts_per_tok": 8,
    "num_local_experts": 256, "eos_token_id": 200_020,
}  # fmt: skip
ERNIE_MOE = {
    **ERNIE, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}  # fmt: skip
EXAONE_MOE = {
    **EXAONE4, "eos_token_id": 53, "mlp_layer_types": None, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
    "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
COHERE2_MOE = {
    **COHERE, "head_dim": 128, "rms_norm_eps": None, "sliding_window": 4096, "sliding_window_pattern": 4,
    "layer_types": None, "mlp_layer_types": None, "num_experts_per_tok": 2, "num_experts": 8, "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax", "norm_topk_prob": True,
    "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1, "prefix_dense_intermediate_size": None,
}  # fmt: skip
FLEX_OLMO = {
    **OLMO, "vocab_size": 100_352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "eos_token_id": 100_257,
    "rope_theta": 500_000.0, "num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False,
}  # fmt: skip
AFMOE = {
    "vocab_size": 200_192, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1408,
    "num_hidden_layers": 32, "num_dense_layers": 1, "num_attention_heads": 16, "head_dim": 128,
    "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 6,
    "num_shared_experts": 2, "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024,
    "layer_types": None, "mup_enabled": False,
}  # fmt: skip
MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MELLUM = {
    "vocab_size": 98_304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131_072,
    "sliding_window": 1024, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
    "norm_topk_prob": True, "mlp_layer_types": None, "first_k_dense_replace": 0, "rope_parameters": MELLUM_ROPE,
}  # fmt: skip
HY3 = {
    "vocab_size": 120_832, "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "num_experts": 192, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "mlp_layer_types": None,
    "first_k_dense_replace": 1,
}  # fmt: skip
SOLAR_OPEN = {
    **GLM4_MOE, "vocab_size": 196_608, "intermediate_size": 0, "moe_intermediate_size": 1280, "num_hidden_layers": 48,
    "num_attention_heads": 64, "head_dim": 128, "rope_theta": 1_000_000.0, "partial_rotary_factor": None,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
GEMMA = {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh", "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
HELIUM = {
    "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8, "rope_theta": 100_000.0, "eos_token_id": 2,
}  # fmt: skip
INTERNLM3 = {
    "vocab_size": 128_512, "hidden_size": 4096, "intermediate_size": 10_240, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5, "qkv_bias": None, "bias": None, "eos_token_id": 2,
}  # fmt: skip
IQUESTCODER = {
    "vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 80,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
CWM = {
    "vocab_size": 128_256, "hidden_size": 6144, "intermediate_size": 21_504, "num_hidden_layers": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": 8192, "sliding_window_pattern": 4,
    "eos_token_id": [128_001, 128_008, 128_009],
}  # fmt: skip
CWM_SCALING = {
    "rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
MINISTRAL = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
    "eos_token_id": 2,
}  # fmt: skip
CLOVA = {**GRANITE, "attention_multiplier": None, "use_post_norm": True}
STABLELM = {
    "vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
    "eos_token_id": 0,
}  # fmt: skip
JAIS2 = {
    "vocab_size": 150_272, "hidden_size": 3328, "intermediate_size": 26_624, "num_hidden_layers": 32,
    "num_attention_heads": 26, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "hidden_act": "relu2",
    "attention_bias": True, "mlp_bias": True, "eos_token_id": 150_024,
}  # fmt: skip
NEMOTRON_H = {
    "vocab_size": 131_072, "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": None, "n_routed_experts": 8, "moe_intermediate_size": 7688, "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "residual_in_fp32": False,
    "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True, "hidden_size": 4096, "num_attention_heads": 32,
}  # fmt: skip
LATENT_EXPERTS = {
    **LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK_V2 = {
    **LATENT_EXPERTS, "vocab_size": 102_400, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "max_position_embeddings": 2048, "eos_token_id": 2, "moe_intermediate_size": 1407, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": None, "norm_topk_prob": False, "topk_method": "greedy",
    "n_group": None, "topk_group": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    **LATENT_EXPERTS, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096, "eos_token_id": 1,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM4_MOE_LITE = {
    **LATENT_EXPERTS, "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
    "num_hidden_layers": 47, "num_attention_heads": 20, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
    "eos_token_id": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 1536,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1, "mlp_layer_types": None,
}  # fmt: skip
MISTRAL4 = {
    **LATENT_EXPERTS, "vocab_size": 131_072, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "max_position_embeddings": 1_048_576, "eos_token_id": 2, "q_lora_rank": 1024, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "moe_intermediate_size": 2048, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 4,
}  # fmt: skip
MISTRAL4_SCALING = {
    "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINICPM3 = {
    **LATENT, "vocab_size": 73_448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
    "num_attention_heads": 40, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "eos_token_id": 2,
    "tie_word_embeddings": True, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": None, "rope_interleave": False, "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 256,
}  # fmt: skip
YOUTU = {
    **LATENT, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
    "num_attention_heads": 16, "max_position_embeddings": 131_072, "eos_token_id": 128_001, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


DELTA_RULE = Recurrence(LINEAR, "delta_net")
SHORT_CONV = Recurrence(CONV, "short_conv")
MAMBA2 = Recurrence(LINEAR, "mamba2")
SIGMOID_EXPERTS = FamilyExperts(  # GLM-4.5, dots.llm1, DeepSeek-V3
    "moe_intermediate_size", None, sparse_after_first, sigmoid=True, factor="routed_scaling_factor", choice_bias=always,
    shared_size="shared_expert_intermediate_size", shared_gated=False, group_best=2,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "llama": Family({"vocab_size": 32_000, "max_position_embeddings": 2048, "eos_token_id": 2}),
    "mistral": Family(
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        layer_types=window_everywhere,
    ),
    "qwen2": Family(QWEN, layer_types=window_from_layer, biases=always_biased),
    "qwen2_5_vl_text": Family(QWEN, layer_types=window_from_layer, biases=always_biased),
    "qwen3": Family({**QWEN, "head_dim": 128}, layer_types=window_from_layer, qk_norm=True),
    "qwen3_vl_text": Family({**QWEN, "head_dim": 128}, qk_norm=True),
    "gemma2": Family(
        GEMMA2, layer_types=window_in_every_other, norm_offset=True, post_norms=True, scale_embeddings=True,
        names={"hidden_act": "hidden_activation"},
    ),
    "gemma3_text": Family(
        GEMMA3, layer_types=window_but_every_nth, norm_offset=True, post_norms=True, qk_norm=True,
        scale_embeddings=True, local_rope=True, names={"hidden_act": "hidden_activation"},
    ),
    "gemma4_text": Family(
        GEMMA4, layer_types=window_but_every_sixth_and_last, layer_details=gemma4_layers, post_norms=True,
        qk_norm=True, value_norm=True, scale_embeddings=True, layer_scales=True, per_layer_inputs=True,
        experts=FamilyExperts("moe_intermediate_size", normalized=True, sparse=sparse_if_enabled, beside_mlp=True),
        names={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    ),
    "gemma4_unified_text": Family(
        GEMMA4_UNIFIED, layer_types=window_but_every_sixth_and_last, layer_details=gemma4_layers, post_norms=True,
        qk_norm=True, value_norm=True, scale_embeddings=True, layer_scales=True, per_layer_inputs=True,
        names={"hidden_act": "hidden_activation"},
    ),
    "phi3": Family(PHI3, layer_types=window_everywhere, partial_rotary=True),
    "smollm3": Family(SMOLLM3, layer_types=window_where_nothing_rotates, rotates=rotates_but_every_nth),
    "qwen2_moe": Family(
        QWEN2_MOE, layer_types=window_in_every_other_first, biases=as_qkv_bias,
        experts=FamilyExperts(
            "moe_intermediate_size", None, sparse_by_step, shared_size="shared_expert_intermediate_size"
        ),
    ),
    "qwen3_moe": Family(
        QWEN3_MOE, layer_types=window_everywhere_if_used, qk_norm=True,
        experts=FamilyExperts("moe_intermediate_size", None, sparse_by_step),
    ),
    "qwen3_vl_moe_text": Family(
        {**QWEN3_MOE, "head_dim": 128}, qk_norm=True,
        experts=FamilyExperts("moe_intermediate_size", True, sparse_by_step, transposed=True),
    ),
    "qwen3_5_text": Family(
        QWEN3_5, layer_types=full_every_nth, partial_rotary=True, norm_offset=True, qk_norm=True,
        recurrence=DELTA_RULE, attention_gate=True,
    ),
    "qwen3_5_moe_text": Family(
        QWEN3_5_MOE, layer_types=full_every_nth, partial_rotary=True, norm_offset=True, qk_norm=True,
        recurrence=DELTA_RULE, attention_gate=True,
        experts=FamilyExperts("moe_intermediate_size", normalized=True, shared_size="shared_expert_intermediate_size"),
    ),
    "qwen3_next": Family(
        QWEN3_NEXT, layer_types=full_every_nth, partial_rotary=True, norm_offset=True, qk_norm=True,
        recurrence=DELTA_RULE, attention_gate=True,
        experts=FamilyExperts(
            "moe_intermediate_size", None, sparse_by_step, shared_size="shared_expert_intermediate_size"
        ),
    ),
    "mixtral": Family(
        MIXTRAL, layer_types=window_everywhere, experts=FamilyExperts("intermediate_size", normalized=True)
    ),
    "olmoe": Family(
        OLMOE, qk_norm=True, whole_qk_norm=True, experts=FamilyExperts("intermediate_size", normalized=None)
    ),
    "granitemoe": Family(
        GRANITE_MOE, multipliers=True, experts=FamilyExperts("intermediate_size", normalized=True)
    ),
    "granitemoehybrid": Family(
        GRANITE_HYBRID, multipliers=True, rotates=rotates_if_stated, recurrence=MAMBA2,
        experts=FamilyExperts(
            "intermediate_size", normalized=True, sparse=sparse_if_there_are_experts,
            shared_size="shared_intermediate_size", shared_gated=False,
        ),
        derived=granite_hybrid_settings,
    ),
    "olmo2": Family(OLMO, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True),
    "olmo3": Family(
        {**OLMO, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0},
        layer_types=window_but_every_nth, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True,
        local_rope=True, names={"rope_local_base_freq": "rope_theta"},  # layers with a window are not scaled
    ),
    "glm4": Family(
        GLM4, biases=as_attention_bias_without_output, post_norms=True, partial_rotary=True, rotates_neighbours=True
    ),
    "granite": Family(GRANITE, multipliers=True),
    "ministral3": Family(MINISTRAL3, layer_types=window_everywhere, scaling=MINISTRAL3_SCALING),
    "seed_oss": Family(SEED_OSS, biases=as_two_settings),
    "ernie4_5": Family(ERNIE, biases=as_use_bias, mlp_bias="use_bias", rotates_neighbours=True),
    "exaone4": Family(
        EXAONE4, layer_types=window_but_every_nth, rotates=rotates_where_windowed, pre_norms=False, post_norms=True,
        qk_norm=True,
    ),
    "cohere": Family(
        {**COHERE, "rope_theta": 500_000.0}, layer_norm=True, parallel=True, rotates_neighbours=True,
        names={"rms_norm_eps": "layer_norm_eps"},
    ),
    "cohere2": Family(
        {**COHERE, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        layer_types=window_but_every_nth, rotates=rotates_where_windowed, layer_norm=True, parallel=True,
        rotates_neighbours=True, names={"rms_norm_eps": "layer_norm_eps"},
    ),
    "starcoder2": Family(
        STARCODER2, layer_types=window_everywhere, biases=as_use_bias, mlp_bias="use_bias", layer_norm=True,
        norm_bias=True, gated=False, names={"rms_norm_eps": "norm_epsilon"},
    ),
    "hunyuan_v1_dense": Family(HUNYUAN, qk_norm=True, qk_norm_last=True),
    "apertus": Family(APERTUS, scaling=APERTUS_SCALING, qk_norm=True, gated=False),
    "nemotron": Family(
        NEMOTRON, partial_rotary=True, norm_offset=True, layer_norm=True, norm_bias=True, gated=False,
        names={"rms_norm_eps": "norm_eps"},
    ),
    "arcee": Family(ARCEE, gated=False),
    "lfm2": Family(
        LFM2, layer_types=conv_but_listed, qk_norm=True, recurrence=SHORT_CONV, names={"rms_norm_eps": "norm_eps"},
        derived=lfm2_sizes,
    ),
    "lfm2_moe": Family(
        LFM2_MOE, layer_types=conv_but_listed, qk_norm=True, recurrence=SHORT_CONV, names={"rms_norm_eps": "norm_eps"},
        experts=FamilyExperts(
            "moe_intermediate_size", None, sparse_after_dense_layers, sigmoid=True, factor="routed_scaling_factor",
            choice_bias=as_use_expert_bias,
        ),
    ),
    "glm4_moe": Family(
        GLM4_MOE, biases=as_attention_bias_without_output, partial_rotary=True, qk_norm=True,
        experts=SIGMOID_EXPERTS, names={"num_experts": "n_routed_experts"}, derived=shared_expert_size,
    ),
    "dots1": Family(
        DOTS1, layer_types=window_from_layer, qk_norm=True, experts=SIGMOID_EXPERTS,
        names={"num_experts": "n_routed_experts"}, derived=shared_expert_size,
    ),
    "minimax_m2": Family(
        MINIMAX_M2, partial_rotary=True, qk_norm=True, whole_qk_norm=True, derived=rotated_part,
        experts=FamilyExperts("intermediate_size", normalized=True, sigmoid=True, choice_bias=always),
    ),
    "gemma": Family(GEMMA, norm_offset=True, scale_embeddings=True, derived=tanh_gelu),
    "vaultgemma": Family(
        GEMMA2, layer_types=window_in_every_other, norm_offset=True, scale_embeddings=True,
        names={"hidden_act": "hidden_activation"},
    ),
    "glm": Family(
        GLM4, biases=as_attention_bias_without_output, partial_rotary=True, rotates_neighbours=True
    ),
    "helium": Family(HELIUM, biases=as_attention_bias_without_output, rotates_neighbours=True),
    "internlm3": Family(INTERNLM3, derived=as_either_name),
    "iquestcoder": Family(IQUESTCODER),
    "cwm": Family(CWM, layer_types=window_but_every_nth_from_first, scaling=CWM_SCALING),
    "ministral": Family(MINISTRAL, layer_types=window_everywhere),
    "hyperclovax": Family(CLOVA, multipliers=True, derived=scaled_by_heads, adapted=clova_spec),
    "stablelm": Family(
        STABLELM, partial_rotary=True, layer_norm=True, norm_bias=True, biases=as_use_qkv_bias, adapted=stablelm_spec,
        names={"rms_norm_eps": "layer_norm_eps"},
    ),
    "jais2": Family(
        JAIS2, layer_norm=True, norm_bias=True, gated=False, names={"rms_norm_eps": "layer_norm_eps"}
    ),
    "ernie4_5_moe": Family(
        ERNIE_MOE, rotates_neighbours=True, derived=ernie_moe_settings,
        experts=FamilyExperts(
            "moe_intermediate_size", True, sparse_in_range, choice_bias=always,
            shared_size="shared_expert_intermediate_size", shared_gated=False,
        ),
        names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "hunyuan_v1_moe": Family(
        {**HUNYUAN, "num_experts": 1, "moe_topk": 1}, qk_norm=True, qk_norm_last=True, derived=hunyuan_moe_settings,
        experts=FamilyExperts("intermediate_size", True, shared_size="intermediate_size", shared_gated=False),
        names={"num_experts_per_tok": "moe_topk"},
    ),
    "exaone_moe": Family(
        EXAONE_MOE, layer_types=window_but_every_nth, rotates=rotates_where_windowed, qk_norm=True,
        experts=replace(SIGMOID_EXPERTS, sparse=sparse_as_listed), names={"n_shared_experts": "num_shared_experts"},
        derived=shared_expert_size,
    ),
    "granitemoeshared": Family(
        {**GRANITE, "num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 0}, multipliers=True,
        experts=FamilyExperts(
            "intermediate_size", normalized=True, shared_size="shared_intermediate_size", shared_gated=False
        ),
    ),
    "cohere2_moe": Family(
        COHERE2_MOE, layer_types=window_but_every_nth_after_dense, rotates=rotates_where_windowed_or_dense,
        parallel=True, rotates_neighbours=True, derived=cohere2_moe_settings, adapted=cohere2_moe_spec,
        experts=FamilyExperts(
            "moe_intermediate_size", None, sparse_as_listed, shared_size="shared_expert_intermediate_size",
            shared_gated=False,
        ),
    ),
    "flex_olmo": Family(
        FLEX_OLMO, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True,
        experts=FamilyExperts("intermediate_size", normalized=None),
    ),
    "afmoe": Family(
        AFMOE, layer_types=window_but_every_nth, rotates=rotates_where_windowed_by_type, post_norms=True, qk_norm=True,
        attention_gate=True, separate_gate=True, derived=shared_expert_size, adapted=afmoe_spec,
        experts=replace(
            SIGMOID_EXPERTS, normalized=True, sparse=sparse_after_dense_layers, factor="route_scale"
        ),
        names={"n_shared_experts": "num_shared_experts", "sliding_window_pattern": "global_attn_every_n_layers"},
    ),
    "mellum": Family(
        MELLUM, qk_norm=True, experts=FamilyExperts("moe_intermediate_size", None, sparse_as_listed)
    ),
    "hy_v3": Family(
        HY3, qk_norm=True, derived=shared_expert_size, names={"n_shared_experts": "num_shared_experts"},
        experts=replace(
            SIGMOID_EXPERTS, normalized=True, sparse=sparse_as_listed, factor="router_scaling_factor"
        ),
    ),
    "solar_open": Family(
        SOLAR_OPEN, biases=as_attention_bias_without_output, partial_rotary=True, derived=shared_expert_size,
        experts=replace(SIGMOID_EXPERTS, sparse=every_layer_sparse), names={"num_experts": "n_routed_experts"},
    ),
    "nemotron_h": Family(
        NEMOTRON_H, layer_details=without_mlp, rotates=never_rotates, gated=False, recurrence=MAMBA2,
        experts=FamilyExperts(
            "moe_intermediate_size", None, sparse_as_listed, sigmoid=True, factor="routed_scaling_factor",
            choice_bias=always, shared_size="moe_shared_expert_intermediate_size", shared_gated=False,
        ),
        names={"rms_norm_eps": "layer_norm_epsilon", "num_experts": "n_routed_experts"}, derived=single_block_settings,
    ),
    "deepseek_v2": Family(
        DEEPSEEK_V2, latent=True, names={"num_experts": "n_routed_experts"}, derived=deepseek_v2_settings,
        experts=FamilyExperts(
            "moe_intermediate_size", False, sparse_after_first, factor="routed_scaling_factor",
            shared_size="shared_expert_intermediate_size", shared_gated=False, group_best=1,
            methods=("greedy", "group_limited_greedy"),
        ),
    ),
    "deepseek_v3": Family(
        DEEPSEEK_V3, latent=True, names={"num_experts": "n_routed_experts"}, derived=shared_expert_size,
        experts=SIGMOID_EXPERTS,
    ),
    "glm4_moe_lite": Family(
        GLM4_MOE_LITE, latent=True, names={"num_experts": "n_routed_experts"}, derived=shared_expert_size,
        experts=replace(SIGMOID_EXPERTS, sparse=sparse_as_listed),
    ),
    "mistral4": Family(
        MISTRAL4, latent=True, names={"num_experts": "n_routed_experts"}, derived=shared_expert_size,
        scaling=MISTRAL4_SCALING, experts=replace(SIGMOID_EXPERTS, sigmoid=False, choice_bias=never, methods=(None,)),
    ),
    "minicpm3": Family(MINICPM3, latent=True, multipliers=True, derived=minicpm3_settings),
    "youtu": Family(YOUTU, latent=True),
    "gpt_oss": Family(
        GPT_OSS, layer_types=window_in_every_other, scaling=GPT_OSS_SCALING, sinks=True, activation="clamped_swiglu",
        experts=FamilyExperts("intermediate_size", normalized=True, biases=True),
    ),
}  # fmt: skip
