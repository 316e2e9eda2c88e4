"""Configs of well-known checkpoints on the hub, spelled as for transformers 4, and tiny configs like them."""

from typing import Any

Config = dict[str, Any]

LLAMA3_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
QWEN: Config = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "rope_type": "llama3", **LLAMA3_ROPE},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
LLAMA2: Config = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "vocab_size": 32000,
}  # fmt: skip
MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32768,
}  # fmt: skip
GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
PHI: Config = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "embd_pdrop": 0.0, "eos_token_id": 32000,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}  # fmt: skip
SMOLLM3: Config = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
    "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip

COMMAND_R7B: Config = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_gated_activation": True,
    "use_parallel_block": True, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
STARCODER2_3B: Config = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
    "intermediate_size": 12288, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
    "num_key_value_heads": 2, "rope_theta": 999999.4420358813, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "use_bias": True, "vocab_size": 49152,
}  # fmt: skip
HUNYUAN_7B: Config = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 128,
    "bos_token_id": 127958, "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "mlp_bias": False,
    "model_type": "hunyuan_v1_dense", "norm_type": "rms", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    }, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_qk_norm": True,
    "vocab_size": 128167,
}  # fmt: skip
APERTUS_8B: Config = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 68,
    "hidden_act": "xielu", "hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 65536,
    "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3", **LLAMA3_ROPE}, "rope_theta": 12000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 131072,
}  # fmt: skip
PUBLISHED: dict[str, Config] = {
    "Llama-3.2-1B": LLAMA,
    "Llama-3.1-8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False, "rope_scaling": {"factor": 8.0, "rope_type": "llama3", **LLAMA3_ROPE},
    },
    "Llama-2-7b": LLAMA2,
    "TinyLlama-1.1B": {
        **LLAMA2, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    },
    "SmolLM2-135M": {
        **LLAMA2, "eos_token_id": 2, "hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_interleaved": False,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {**MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "Mistral-7B-v0.3": MISTRAL,
    "Mistral-Nemo": {
        **MISTRAL, "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 131072, "num_hidden_layers": 40,
        "vocab_size": 131072,
    },
    "Qwen2.5-0.5B": QWEN,
    "Qwen2.5-7B": {
        **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "tie_word_embeddings": False,
        "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **QWEN, "eos_token_id": 151643, "hidden_size": 1536, "intermediate_size": 8960, "rope_theta": 10000,
        "max_position_embeddings": 131072, "num_attention_heads": 12, "num_hidden_layers": 28, "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": QWEN3,
    "Qwen3-8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 36, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"},
    },
    "gemma-3-1b-it": GEMMA3,
    "gemma-3-270m": {
        **GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "use_bidirectional_attention": False,
    },
    "Phi-3-mini-4k": PHI,
    "Phi-4-mini": {
        **PHI, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
        "rope_scaling": {"long_factor": [2.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    },
    "SmolLM3-3B": SMOLLM3,
    "Command-R7B": COMMAND_R7B,
    "starcoder2-3b": STARCODER2_3B,
    "Hunyuan-7B": HUNYUAN_7B,
    "Apertus-8B": APERTUS_8B,
}  # fmt: skip
GEMMA3_4B: Config = {  # multimodal: states only values that are not defaults of its text model
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
    "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip


def shrunk(config: Config) -> Config:
    """Returns the config of a tiny model with the same features: 4 heads, 3 layers, smaller windows and contexts."""
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads")
    wide = config.get("head_dim") and config["head_dim"] * heads != config["hidden_size"]
    small = {
        **config, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4 if kv == heads else 1 if kv == 1 else 2, "vocab_size": 512, "initializer_range": 0.2,
        "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "torch_dtype": "float32",
    }  # fmt: skip
    if config.get("head_dim"):
        small["head_dim"] = 32 if wide else 16
    for name, value in {"sliding_window": 16, "max_window_layers": 3, "original_max_position_embeddings": 128}.items():
        if config.get(name):
            small[name] = value
    for name in ("layer_types", "no_rope_layers"):
        if config.get(name):
            small[name] = config[name][3:6]
    if config.get("rope_scaling"):
        small["rope_scaling"] = _shrunk_rope(config["rope_scaling"])
    # so that the tiny model's three layers include a layer without a window
    if config["model_type"] in ("gemma3_text", "cohere2"):
        small["sliding_window_pattern"] = 3
    return small


def _shrunk_rope(scaling: Config) -> Config:
    small = dict(scaling)
    if "original_max_position_embeddings" in scaling:
        small["original_max_position_embeddings"] = 64
    for name in ("long_factor", "short_factor"):
        if name in scaling:
            small[name] = [1.0 + 0.25 * i for i in range(6)]
    return small


# Releases whose names say another number than their model_type: Qwen3.6 and Qwen3.8 have the layers of Qwen3.5.
QWEN3_6_ROPE = {
    "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10_000_000,
    "rope_type": "default",
}  # fmt: skip
QWEN3_6_TEXT: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-6, "rope_parameters": QWEN3_6_ROPE,
    "tie_word_embeddings": False, "vocab_size": 248_320,
}  # fmt: skip
QWEN3_6_27B: Config = {
    **QWEN3_6_TEXT, "hidden_size": 5120, "intermediate_size": 17_408, "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text", "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
}  # fmt: skip
QWEN3_6_35B_A3B: Config = {
    **QWEN3_6_TEXT, "hidden_size": 2048, "linear_num_value_heads": 32, "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
}  # fmt: skip
RELEASES: dict[str, tuple[str, str, Config]] = {  # name → class, model_type, config of the text model
    "Qwen3.6-27B": ("Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN3_6_27B),
    "Qwen3.8-27B": ("Qwen3_5ForConditionalGeneration", "qwen3_5", {**QWEN3_6_27B, "output_gate_type": "swish"}),
    "Qwen3.6-35B-A3B": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN3_6_35B_A3B),
}
