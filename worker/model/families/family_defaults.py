"""The defaults of the model families' settings.

They equal the defaults of the config classes in transformers, because config.json may omit a setting whose value is the
default.
"""

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
GPT_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
