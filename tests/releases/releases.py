"""The releases that are fetched most, as facts: their configs, the names of their tensors, and the forms on the hub.

The sizes are those of the release; trial.py cuts them. A text model's tensors are listed for the layers that are
kept. `source` says where the facts are from, and that the config is assumed if it could not be seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.releases import layouts as of
from tests.releases.layouts import Tensors
from tests.worker.models.published import (
    GEMMA3,
    GEMMA3_4B,
    LLAMA,
    LLAMA3_ROPE,
    MISTRAL,
    PHI,
    PUBLISHED,
    QWEN,
    QWEN3,
    SMOLLM3,
)
from tests.worker.models.published import RELEASES as QWEN_RELEASES

Config = Mapping[str, Any]
SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
CLASSES = "names from transformers 5.23's class, config assumed"
SEEN = "config as in tests/worker/models/published.py"

# forms of weights; forms.py says what each is
PLAIN, BLOCKS, STATIC, DYNAMIC = "bf16", "fp8-block", "fp8-static", "fp8-dynamic"
GPTQ, AWQ, ROUND, INT4, INT4_AWQ = "gptq", "awq", "auto-round", "ct-int4", "ct-awq"
NVFP4, MODELOPT4, MODELOPT8, MIXED, MOE_PREFIX = (
    "ct-nvfp4", "modelopt-nvfp4", "modelopt-fp8", "modelopt-mixed", "modelopt-nvfp4-moe"
)  # fmt: skip
MXFP4, NF4, FUSED8, FUSED_STATIC = "mxfp4", "bnb-nf4", "fp8-block-fused", "fp8-static-fused"
HEADS = (PLAIN, BLOCKS)
DENSE = (PLAIN, BLOCKS, GPTQ, AWQ, ROUND, INT4, INT4_AWQ, DYNAMIC, NVFP4, MODELOPT4, NF4)
SPARSE = (PLAIN, BLOCKS, GPTQ, AWQ, ROUND, INT4, DYNAMIC, NVFP4, MODELOPT4)


@dataclass(frozen=True)
class Release:
    """A release.

    model: its name on the hub
    architecture: the class that config.json names
    config: config.json without the class; the text model's part is in `text_config` if the model is multimodal
    layers: the tensors of each layer that is kept; kept: the numbers of these layers in the release
    prefix, head: the beginnings of the names of the text model's tensors, and the name of its head ("" if it is tied)
    outside: further tensors of the text model, after the prefix; beside: tensors that it does not need, by whole name
    forms: the forms in which it is tried; plain: a pattern of modules that forms of few bits leave as they are
    heads: the forms in which its MTP head is tried
    gguf: for the GGUF file, its row of tests/gguf_kinds.py; mixes: of types of tensors
    seeing: for a GGUF file with its tower beside it, the kind of tests/worker/vision/harness.py
    unread: the architecture of its GGUF files, if they are not read
    refused: a part of the error if the release is not served
    """

    model: str
    architecture: str
    config: Config
    layers: tuple[Tensors, ...]
    source: str
    kept: tuple[int, ...] = (0, 1)
    prefix: str = "model."
    head: str = "lm_head.weight"
    outside: Tensors = field(default_factory=dict)
    beside: Tensors = field(default_factory=dict)
    forms: tuple[str, ...] = DENSE
    plain: str = ""
    heads: tuple[str, ...] = ()
    gguf: str = ""
    mixes: tuple[str, ...] = ()
    seeing: str = ""
    unread: tuple[str, ...] = ()
    refused: str = ""


def around(model_type: str, text: Config, **more: Any) -> dict[str, Any]:
    """Returns the config of a multimodal model around a text model."""
    return {"model_type": model_type, "text_config": text, **more}


def nextn(layer: int, own: Tensors) -> Tensors:
    """Returns the tensors of a layer for drafts, which comes after the last layer. own: those of a layer"""
    return {f"model.layers.{layer}.{name}": shape for name, shape in {**own, **of.NEXTN}.items()}


INNER, OLD_INNER = "model.language_model.", "language_model.model."  # prefixes in multimodal models
QWEN_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120}
QWEN_TOWER = {"model.visual.blocks.0.norm1.weight": "h", "model.visual.merger.norm.weight": "h"}
TOWER = {"model.vision_tower.encoder.layers.0.input_layernorm.weight": "h"}
OLD_TOWER = {
    "vision_tower.transformer.layers.0.attention_norm.weight": "h", "multi_modal_projector.linear_1.weight": "h h",
    "vision_tower.ln_pre.weight": "h",
}  # fmt: skip
K_M, UD4, UD2, Q8, MX = "Q4_K_M", "UD-Q4_K_XL", "UD-IQ2_XXS", "Q8_0", "MXFP4"
EVERY_MIX = (K_M, UD4, UD2, Q8)

_, _, QWEN3_6_27B = QWEN_RELEASES["Qwen3.6-27B"]
_, _, QWEN3_8_27B = QWEN_RELEASES["Qwen3.8-27B"]
_, _, QWEN3_6_35B = QWEN_RELEASES["Qwen3.6-35B-A3B"]
QWEN_IDS = {"image_token_id": 248056, "video_token_id": 248057, "tie_word_embeddings": False}
QWEN_PLAIN = r"linear_attn\.in_proj_[ab]\b"
DELTA_MLP, GATED_MLP = {**of.DELTA, **of.MLP}, {**of.GATED, **of.MLP}
DELTA_MOE = {**of.DELTA, **of.FUSED, **of.GATED_SHARED}
GATED_MOE = {**of.GATED, **of.FUSED, **of.GATED_SHARED}
QWEN_SOURCE = "SGLang's and llama.cpp's threads about this file; " + SEEN


def qwen3_6(name: str, text: Config, **more: Any) -> Release:
    return Release(
        name, "Qwen3_5ForConditionalGeneration", around("qwen3_5", text, vision_config=QWEN_VISION, **QWEN_IDS),
        (DELTA_MLP, GATED_MLP), QWEN_SOURCE, kept=(2, 3), prefix=INNER, beside={**QWEN_TOWER, **of.QWEN_MTP},
        forms=(*DENSE, MIXED), plain=QWEN_PLAIN, heads=HEADS, gguf="qwen3_5", mixes=EVERY_MIX, seeing="qwen3_5", **more,
    )  # fmt: skip


GEMMA4_TYPES = ([SLIDING] * 5 + [FULL]) * 10
GEMMA4_TEXT: Config = {
    "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16", "enable_moe_block": False,
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21_504, "layer_types": GEMMA4_TYPES, "max_position_embeddings": 262_144,
    "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
    "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip
GEMMA4_26B: Config = {
    **GEMMA4_TEXT, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
    "layer_types": GEMMA4_TYPES[:30], "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
    "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8,
}  # fmt: skip
GEMMA4_E2B: Config = {
    **GEMMA4_TEXT, "attention_k_eq_v": False, "hidden_size": 1536, "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144, "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "max_position_embeddings": 131_072,
    "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
    "num_kv_shared_layers": 20, "sliding_window": 512, "use_bidirectional_attention": None, "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA4_SOURCE = f"{CLASSES}; names of experts also from vLLM's and SGLang's threads"
GEMMA4_EXPERT = {**of.GEMMA4, **of.GEMMA4_EXPERTS}
GEMMA4_FULL_EXPERT = {**of.GEMMA4_KEYS, **of.GEMMA4_EXPERTS}

GPT_OSS: Config = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "pad_token_id": 199_999, "rms_norm_eps": 1e-5, "rope_theta": 150_000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201_088,
}  # fmt: skip
QWEN_MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
QWEN3_VL: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": 151_645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12_288, "max_position_embeddings": 262_144,
    "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_scaling": QWEN_MROPE, "rope_theta": 5_000_000, "vocab_size": 151_936,
}  # fmt: skip
QWEN3_VL_MOE: Config = {
    **QWEN3_VL, "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
}  # fmt: skip
QWEN3_MOE: Config = {
    **QWEN3, "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48,
    "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 10_000_000, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT: Config = {
    **{name: value for name, value in QWEN3_6_35B.items() if name != "rope_parameters"},
    "decoder_sparse_step": 1, "eos_token_id": 151_645, "intermediate_size": 5120, "mlp_only_layers": [],
    "model_type": "qwen3_next", "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10_000_000,
    "vocab_size": 151_936,
}  # fmt: skip
NEMOTRON_3: Config = {
    "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "max_position_embeddings": 262_144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "residual_in_fp32": False, "routed_scaling_factor": 2.5,
    "ssm_state_size": 128, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "use_bias": False, "use_conv_bias": True, "vocab_size": 131_072,
}  # fmt: skip
GLM_FLASH: Config = {
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [154_820, 154_827, 154_829],
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10_240,
    "kv_lora_rank": 512, "max_position_embeddings": 202_752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154_880,
}  # fmt: skip
DEEPSEEK: Config = {
    "attention_bias": False, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18_432, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10_000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129_280,
}  # fmt: skip
LFM2: Config = {
    "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12_288, "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
    "conv_use_xavier_init": True, "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048,
    "layer_types": [CONV, CONV, FULL, CONV, CONV, FULL, CONV, CONV, FULL, CONV, FULL, CONV, FULL, CONV, FULL, CONV],
    "max_position_embeddings": 128_000, "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1_000_000.0,
    "tie_embedding": True, "use_pos_enc": True, "vocab_size": 65_536,
}  # fmt: skip
LFM2_MOE: Config = {
    "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": [
        CONV, CONV, FULL, CONV, CONV, CONV, FULL, CONV, CONV, CONV, FULL, CONV, CONV, CONV, FULL, CONV, CONV, CONV,
        FULL, CONV, CONV, FULL, CONV, CONV,
    ],
    "max_position_embeddings": 128_000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-5,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "rope_theta": 1_000_000.0,
    "routed_scaling_factor": 1.0, "use_expert_bias": True, "vocab_size": 65_536,
}  # fmt: skip
GRANITE_4: Config = {
    "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12, "eos_token_id": 100_257,
    "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 6, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 131_072,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 10_000, "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 100_352,
}  # fmt: skip
GRANITE_MICRO: Config = {
    **GRANITE_4, "hidden_size": 2560, "intermediate_size": 8192, "layer_types": ["attention"] * 40,
    "logits_scaling": 10, "num_attention_heads": 40, "num_experts_per_tok": 0, "num_key_value_heads": 8,
    "num_local_experts": 0, "position_embedding_type": "rope", "rope_theta": 10_000_000,
    "shared_intermediate_size": 8192,
}  # fmt: skip
MINISTRAL_3: Config = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336,
    "max_position_embeddings": 262_144, "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 131_072,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384, "rope_theta": 1_000_000.0,
        "rope_type": "yarn", "type": "yarn",
    },
}  # fmt: skip
MISTRAL_4: Config = {
    "attention_bias": False, "first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12_288, "kv_lora_rank": 256, "max_position_embeddings": 1_048_576, "model_type": "mistral4",
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
    "num_key_value_heads": 32, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_interleave": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "topk_group": 1, "v_head_dim": 128, "vocab_size": 131_072,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "rope_theta": 10_000.0, "rope_type": "yarn",
        "type": "yarn",
    },
}  # fmt: skip
PIXTRAL_VISION = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 24, "patch_size": 14, "image_size": 1540, "head_dim": 64, "rope_theta": 10_000.0,
}  # fmt: skip
MISTRAL_IDS = {"image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1}
MELLUM_2: Config = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 7168,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 7, "max_position_embeddings": 131_072,
    "mlp_layer_types": ["sparse"] * 28, "model_type": "mellum", "moe_intermediate_size": 896, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 1024, "tie_word_embeddings": False,
    "vocab_size": 98_304, "eos_token_id": 0,
    "rope_parameters": {
        FULL: {"rope_theta": 500_000.0, "rope_type": "default"},
        SLIDING: {"rope_theta": 10_000.0, "rope_type": "default"},
    },
}  # fmt: skip
COHERE_MOE: Config = {
    "attention_bias": False, "eos_token_id": 255_001, "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 1536, "layer_norm_eps": 1e-5,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 10, "logit_scale": 0.25, "max_position_embeddings": 131_072,
    "mlp_layer_types": ["dense", *["sparse"] * 39], "model_type": "cohere2_moe", "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "num_shared_experts": 0, "prefix_dense_intermediate_size": 12_288, "rope_theta": 50_000,
    "sliding_window": 4096, "tie_word_embeddings": True, "vocab_size": 256_000,
}  # fmt: skip
LAGUNA: Config = {
    "gating": True, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 8192, "model_type": "laguna",
    "num_attention_heads": 48, "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 100_352,
}  # fmt: skip
MUSE: Config = around("muse_glimmer", {"model_type": "muse_glimmer_text", "hidden_size": 6656, "vocab_size": 202_048})
GLM_4_7: Config = {
    "attention_bias": True, "eos_token_id": [151_329, 151_336, 151_338], "first_k_dense_replace": 3, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12_288, "max_position_embeddings": 202_752,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1_000_000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True, "vocab_size": 151_552, "dtype": "bfloat16",
}  # fmt: skip
MINIMAX_M2: Config = {
    "attn_type_list": [1] * 62, "eos_token_id": 200_020, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196_608, "model_type": "minimax_m2",
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200_064,
}  # fmt: skip
QWEN2_5_VL: Config = {
    **{name: value for name, value in QWEN.items() if name not in ("architectures", "use_mrope")},
    "hidden_size": 3584, "intermediate_size": 18_944, "max_position_embeddings": 128_000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "tie_word_embeddings": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
                      "out_hidden_size": 3584, "model_type": "qwen2_5_vl"},
    "image_token_id": 151_655, "video_token_id": 151_656, "vocab_size": 152_064,
}  # fmt: skip
OLMO_3: Config = {
    "attention_bias": False, "eos_token_id": 100_257, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11_008, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
    "max_position_embeddings": 65_536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500_000, "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100_278,
}  # fmt: skip
SEED_OSS: Config = {
    "attention_bias": True, "attention_out_bias": False, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 27_648, "max_position_embeddings": 524_288, "mlp_bias": False,
    "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 155_136,
}  # fmt: skip


def without_class(config: Config, **more: Any) -> dict[str, Any]:
    """Returns a published config without the name of the class."""
    return {name: value for name, value in config.items() if name not in ("architectures", "auto_map")} | more


LLAMA_8B = without_class(
    LLAMA, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False,
    rope_scaling={"factor": 8.0, "rope_type": "llama3", **LLAMA3_ROPE},
)  # fmt: skip
QWEN_7B = without_class(
    QWEN, hidden_size=3584, intermediate_size=18_944, max_window_layers=28, num_attention_heads=28,
    num_hidden_layers=28, num_key_value_heads=4, sliding_window=131_072, tie_word_embeddings=False, vocab_size=152_064,
)  # fmt: skip
QWEN3_8B = without_class(
    QWEN3, hidden_size=4096, intermediate_size=12_288, max_window_layers=36, num_attention_heads=32,
    num_hidden_layers=36, tie_word_embeddings=False,
)  # fmt: skip
GEMMA3_TEXT = {
    **GEMMA3_4B["text_config"], "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "vocab_size": 262_208,
}  # fmt: skip
GEMMA3_IDS = {"mm_tokens_per_image": 256, "image_token_index": 262_144, "boi_token_index": 255_999}
MISTRAL_24B = without_class(
    MISTRAL, head_dim=128, hidden_size=5120, intermediate_size=32_768, max_position_embeddings=131_072,
    num_hidden_layers=40, rope_theta=1e9, vocab_size=131_072,
)  # fmt: skip
COMMON_GGUF = (K_M, UD4, Q8)
SIGLIP2_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip2_vision_model", "num_attention_heads": 16,
    "num_hidden_layers": 26, "num_patches": 256, "patch_size": 16,
}  # fmt: skip


def refused(model: str, architecture: str, config: Config, error: str) -> Release:
    """Returns a release that is not served. config: as much of it as shows that. error: a part of the error"""
    return Release(model, architecture, config, (), CLASSES, forms=(PLAIN,), refused=error)


def of_type(model_type: str) -> Config:
    return {"model_type": model_type, "vocab_size": 128_256, "hidden_size": 2048}


RELEASES = (
    qwen3_6("Qwen/Qwen3.6-27B", QWEN3_6_27B),
    qwen3_6("Qwen/Qwen3.8-27B", QWEN3_8_27B),
    Release(
        "Qwen/Qwen3.6-35B-A3B", "Qwen3_5MoeForConditionalGeneration",
        around("qwen3_5_moe", QWEN3_6_35B, vision_config={**QWEN_VISION, "out_hidden_size": 2048}, **QWEN_IDS),
        (DELTA_MOE, GATED_MOE), QWEN_SOURCE, kept=(2, 3), prefix=INNER, beside={**QWEN_TOWER, **of.QWEN_MOE_MTP},
        forms=(*SPARSE, MIXED, FUSED8), plain=QWEN_PLAIN, heads=HEADS, gguf="qwen3_5-moe", mixes=EVERY_MIX,
    ),
    Release(
        "google/gemma-4-31B-it", "Gemma4ForConditionalGeneration", around("gemma4", GEMMA4_TEXT),
        (of.GEMMA4, of.GEMMA4_KEYS), GEMMA4_SOURCE, kept=(4, 5), prefix=INNER, head="", beside=TOWER,
        gguf="gemma4-dense", mixes=EVERY_MIX,
    ),
    Release(
        "google/gemma-4-26B-A4B-it", "Gemma4ForConditionalGeneration", around("gemma4", GEMMA4_26B),
        (GEMMA4_EXPERT, GEMMA4_FULL_EXPERT), GEMMA4_SOURCE, kept=(4, 5), prefix=INNER, head="", beside=TOWER,
        forms=(*SPARSE, MOE_PREFIX), gguf="gemma4-moe", mixes=EVERY_MIX,
    ),
    Release(
        "google/gemma-4-E2B-it", "Gemma4ForConditionalGeneration", around("gemma4", GEMMA4_E2B),
        ({**of.GEMMA4, **of.PER_LAYER}, {**of.GEMMA4_VALUES, **of.PER_LAYER}), GEMMA4_SOURCE, kept=(3, 4), prefix=INNER,
        head="", outside=of.PER_LAYER_TABLE, beside=TOWER, gguf="gemma4", mixes=EVERY_MIX, plain="per_layer",
    ),
    Release(
        "openai/gpt-oss-20b", "GptOssForCausalLM", GPT_OSS, (of.GPT_OSS, of.GPT_OSS), CLASSES,
        forms=(MXFP4, PLAIN), gguf="gpt-oss", mixes=(MX, K_M, UD4),
    ),
    Release(
        "Qwen/Qwen3-VL-8B-Instruct", "Qwen3VLForConditionalGeneration",
        around("qwen3_vl", QWEN3_VL, vision_config=QWEN_VISION, tie_word_embeddings=False), (of.QWEN3, of.QWEN3),
        CLASSES, prefix=INNER, beside=QWEN_TOWER, seeing="qwen3_vl",
    ),
    Release(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3VLMoeForConditionalGeneration",
        around("qwen3_vl_moe", QWEN3_VL_MOE, vision_config=QWEN_VISION, tie_word_embeddings=False),
        (of.QWEN3_VL_MOE, of.QWEN3_VL_MOE), CLASSES, prefix=INNER, beside=QWEN_TOWER, forms=SPARSE,
    ),
    Release(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "NemotronHForCausalLM", NEMOTRON_3,
        (of.NEMOTRON_MAMBA, of.NEMOTRON_MOE, of.NEMOTRON_MAMBA, of.NEMOTRON_FULL, of.NEMOTRON_MOE),
        CLASSES, kept=(2, 3, 4, 5, 6), prefix="backbone.",
        forms=(PLAIN, MODELOPT8, MODELOPT4, NVFP4, DYNAMIC, INT4, ROUND), unread=("nemotron_h_moe",),
    ),
    Release(
        "zai-org/GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", GLM_FLASH, (of.LATENT_MLP, of.LATENT_MOE), CLASSES,
        forms=SPARSE, beside=nextn(47, of.LATENT_MOE), heads=HEADS, gguf="deepseek-v3", mixes=(K_M, UD4),
    ),
    Release("LiquidAI/LFM2.5-1.2B-Instruct", "Lfm2ForCausalLM", LFM2,
            ({**of.LFM2_CONV, **of.LFM2_MLP}, {**of.LFM2_FULL, **of.LFM2_MLP}), CLASSES, kept=(1, 2), head="",
            gguf="lfm2", mixes=COMMON_GGUF),
    Release("LiquidAI/LFM2-8B-A1B", "Lfm2MoeForCausalLM", LFM2_MOE,
            ({**of.LFM2_CONV, **of.LFM2_MLP}, {**of.LFM2_FULL, **of.LFM2_EXPERTS}), CLASSES, kept=(1, 2), head="",
            forms=SPARSE, unread=("lfm2moe",)),
    Release("openbmb/MiniCPM5-1B", "LlamaForCausalLM",
            without_class(LLAMA, head_dim=128, hidden_size=1536, num_attention_heads=16, num_key_value_heads=2,
                          rope_scaling=None, vocab_size=130_560),
            (of.LLAMA, of.LLAMA), "class from LLaMA-Factory's thread (a plain Llama), sizes assumed", head="",
            gguf="llama", mixes=COMMON_GGUF),
    Release("ibm-granite/granite-4.0-h-tiny", "GraniteMoeHybridForCausalLM", GRANITE_4,
            ({**of.GRANITE_MAMBA, **of.GRANITE_EXPERTS}, {**of.GRANITE_FULL, **of.GRANITE_EXPERTS}), CLASSES,
            kept=(4, 5), head="", forms=(PLAIN, DYNAMIC), plain=r"block_sparse_moe|mamba", gguf="granite-hybrid-moe",
            mixes=(K_M, UD4)),
    Release("ibm-granite/granite-4.0-micro", "GraniteMoeHybridForCausalLM", GRANITE_MICRO,
            (of.GRANITE_FULL, of.GRANITE_FULL), CLASSES, head="", forms=(PLAIN, DYNAMIC, INT4, BLOCKS)),
    Release("mistralai/Ministral-3-8B-Instruct-2512", "Mistral3ForConditionalGeneration",
            around("mistral3", MINISTRAL_3, vision_config=PIXTRAL_VISION, **MISTRAL_IDS), (of.LLAMA, of.LLAMA),
            f"transformers' converter of these weights, and its thread; {CLASSES}", prefix=OLD_INNER,
            head="language_model.lm_head.weight", beside=OLD_TOWER, forms=(STATIC, *DENSE), gguf="ministral3",
            mixes=COMMON_GGUF),
    Release("mistralai/Mistral-Small-4-119B-2603", "Mistral3ForConditionalGeneration",
            around("mistral3", MISTRAL_4, vision_config=PIXTRAL_VISION, **MISTRAL_IDS), (of.MISTRAL4, of.MISTRAL4),
            f"{CLASSES}; the class stacks the experts, and so does the trial", prefix=OLD_INNER,
            head="language_model.lm_head.weight", beside=OLD_TOWER, forms=(FUSED_STATIC, PLAIN, NVFP4, INT4),
            unread=("mistral4",)),
    Release("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "Mistral3ForConditionalGeneration",
            around("mistral3", MISTRAL_24B, vision_config=PIXTRAL_VISION, **MISTRAL_IDS), (of.LLAMA, of.LLAMA),
            CLASSES, prefix=OLD_INNER, head="language_model.lm_head.weight", beside=OLD_TOWER, gguf="mistral-small",
            mixes=COMMON_GGUF, seeing="mistral3"),
    Release("HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM", without_class(SMOLLM3, tie_word_embeddings=True),
            (of.LLAMA, of.LLAMA), SEEN, kept=(2, 3), head="", gguf="smollm3", mixes=COMMON_GGUF),
    Release("mistralai/Devstral-Small-2-24B-Instruct-2512", "Mistral3ForConditionalGeneration",
            around("mistral3", {**MINISTRAL_3, "hidden_size": 5120, "intermediate_size": 32_768,
                                "num_hidden_layers": 40}, vision_config=PIXTRAL_VISION, **MISTRAL_IDS),
            (of.LLAMA, of.LLAMA), f"transformers' thread about its FP8; {CLASSES}", prefix=OLD_INNER,
            head="language_model.lm_head.weight", beside=OLD_TOWER, forms=(STATIC, PLAIN, AWQ, INT4),
            gguf="ministral3", mixes=COMMON_GGUF),
    Release("LiquidAI/LFM2.5-VL-1.6B", "Lfm2VlForConditionalGeneration",
            around("lfm2_vl", LFM2, vision_config=SIGLIP2_VISION, downsample_factor=2, image_token_id=396),
            ({**of.LFM2_CONV, **of.LFM2_MLP}, {**of.LFM2_FULL, **of.LFM2_MLP}), CLASSES, kept=(1, 2), prefix=INNER,
            head="", forms=(PLAIN, DYNAMIC, INT4), gguf="lfm2", mixes=COMMON_GGUF, seeing="lfm2_vl"),
    Release("microsoft/Phi-4-mini-instruct", "Phi3ForCausalLM", without_class(PUBLISHED["Phi-4-mini"]),
            (of.PHI3, of.PHI3), SEEN, head="", forms=(PLAIN, AWQ, GPTQ, INT4, DYNAMIC), gguf="phi3",
            mixes=COMMON_GGUF),
    Release("poolside/Laguna-XS.2", "LagunaForCausalLM", LAGUNA, (of.QWEN3, of.QWEN3),
            "SGLang's thread: heads differ between layers, gates of attention are softplus", forms=(PLAIN,),
            refused="model_type 'laguna' is not supported"),
    Release("meta/Muse-Glimmer", "MuseGlimmerForConditionalGeneration", MUSE, (of.LLAMA, of.LLAMA),
            f"{CLASSES}, and name on the hub assumed", forms=(PLAIN,),
            refused="model_type 'muse_glimmer' is not supported"),
    refused("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B", "NemotronHForCausalLM",
            {**NEMOTRON_3, "moe_latent_size": 1024}, "moe_latent_size 1024 is not supported"),
    refused("deepseek-ai/DeepSeek-V3.2", "DeepseekV32ForCausalLM", of_type("deepseek_v32"), "'deepseek_v32'"),
    refused("zai-org/GLM-5", "GlmMoeDsaForCausalLM", of_type("glm_moe_dsa"), "'glm_moe_dsa'"),
    refused("moonshotai/Kimi-K2.5", "KimiK25ForConditionalGeneration", of_type("kimi_k25"), "'kimi_k25'"),
    refused("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama4ForConditionalGeneration", of_type("llama4"),
            "'llama4'"),
    refused("google/gemma-3n-E4B-it", "Gemma3nForConditionalGeneration", of_type("gemma3n"), "'gemma3n'"),
    Release("JetBrains/Mellum2", "MellumForCausalLM", MELLUM_2,
            (of.QWEN3_MOE, of.QWEN3_MOE), CLASSES, kept=(2, 3), forms=SPARSE),
    Release("CohereLabs/cohere2-moe", "Cohere2MoeForCausalLM", COHERE_MOE, (of.COHERE_MLP, of.COHERE_MOE),
            f"{CLASSES}, and name on the hub assumed", head="", forms=SPARSE),
    Release("Qwen/Qwen2.5-7B-Instruct", "Qwen2ForCausalLM", QWEN_7B, (of.QWEN2, of.QWEN2), SEEN,
            forms=(*DENSE, MODELOPT8), gguf="qwen2", mixes=EVERY_MIX),
    Release("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2ForCausalLM",
            {**QWEN_7B, "eos_token_id": 151_643, "max_position_embeddings": 131_072, "rope_theta": 10_000,
             "sliding_window": 4096}, (of.QWEN2, of.QWEN2), SEEN, gguf="qwen2", mixes=COMMON_GGUF),
    Release("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2_5_VLForConditionalGeneration", QWEN2_5_VL, (of.QWEN2, of.QWEN2),
            CLASSES, beside={"visual.blocks.0.norm1.weight": "h"}, forms=(PLAIN, AWQ, GPTQ, DYNAMIC, INT4, NF4),
            seeing="qwen2_5_vl"),
    Release("Qwen/Qwen3-8B", "Qwen3ForCausalLM", QWEN3_8B, (of.QWEN3, of.QWEN3), SEEN,
            forms=(*DENSE, MODELOPT8), gguf="qwen3", mixes=EVERY_MIX),
    Release("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3MoeForCausalLM", without_class(QWEN3_MOE),
            (of.QWEN3_MOE, of.QWEN3_MOE), CLASSES, forms=SPARSE, gguf="qwen3-moe", mixes=EVERY_MIX),
    Release("Qwen/Qwen3-Coder-Next", "Qwen3NextForCausalLM", QWEN3_NEXT,
            ({**of.NEXT_DELTA, **of.EACH, **of.GATED_SHARED}, {**of.GATED, **of.EACH, **of.GATED_SHARED}), CLASSES,
            kept=(2, 3), forms=SPARSE, plain=r"linear_attn\.in_proj_ba\b", gguf="qwen3-next", mixes=(K_M, UD4)),
    Release("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", LLAMA_8B, (of.LLAMA, of.LLAMA), SEEN,
            forms=(*DENSE, MODELOPT8), gguf="llama", mixes=EVERY_MIX),
    Release("meta-llama/Llama-3.2-1B-Instruct", "LlamaForCausalLM", without_class(LLAMA), (of.LLAMA, of.LLAMA), SEEN,
            head="", gguf="llama", mixes=COMMON_GGUF),
    Release("google/gemma-3-4b-it", "Gemma3ForConditionalGeneration", around("gemma3", GEMMA3_TEXT, **GEMMA3_IDS),
            (of.GEMMA3, of.GEMMA3), SEEN, kept=(4, 5), prefix=OLD_INNER, head="",
            beside={"multi_modal_projector.mm_soft_emb_norm.weight": "h"}, gguf="gemma3", mixes=EVERY_MIX,
            seeing="gemma3"),
    Release("google/gemma-3-1b-it", "Gemma3ForCausalLM", without_class(GEMMA3), (of.GEMMA3, of.GEMMA3), SEEN,
            kept=(4, 5), head="", gguf="gemma3", mixes=COMMON_GGUF),
    Release("microsoft/phi-4", "Phi3ForCausalLM",
            without_class(PHI, eos_token_id=100_265, hidden_size=5120, intermediate_size=17_920,
                          max_position_embeddings=16_384, num_attention_heads=40, num_hidden_layers=40,
                          num_key_value_heads=10, original_max_position_embeddings=16_384, rope_theta=250_000,
                          sliding_window=None, vocab_size=100_352),
            (of.PHI3, of.PHI3), CLASSES, gguf="phi3", mixes=COMMON_GGUF),
    Release("zai-org/GLM-4.7", "Glm4MoeForCausalLM", GLM_4_7,
            ({**of.NORMS, **of.attention(bias=True), **of.QK_NORMS, **of.MLP}, of.GLM4_MOE), CLASSES, kept=(2, 3),
            forms=SPARSE, beside=nextn(92, of.GLM4_MOE), heads=HEADS, gguf="glm4-moe", mixes=(K_M, UD4)),
    Release("deepseek-ai/DeepSeek-V3.1", "DeepseekV3ForCausalLM", DEEPSEEK, (of.LATENT_MLP, of.LATENT_MOE), CLASSES,
            kept=(2, 3), forms=(BLOCKS, PLAIN, AWQ, MODELOPT4, INT4), beside=nextn(61, of.LATENT_MOE), heads=HEADS,
            gguf="deepseek-v3", mixes=(K_M, UD4)),
    Release("MiniMaxAI/MiniMax-M2", "MiniMaxM2ForCausalLM", MINIMAX_M2, (of.MINIMAX_M2, of.MINIMAX_M2), CLASSES,
            forms=(BLOCKS, PLAIN, AWQ, INT4, MODELOPT4), unread=("minimax-m2",)),
    Release("allenai/Olmo-3-7B-Instruct", "Olmo3ForCausalLM", OLMO_3, (of.OLMO3, of.OLMO3), CLASSES, kept=(2, 3),
            forms=(PLAIN, DYNAMIC, INT4, GPTQ, AWQ), gguf="olmo3", mixes=COMMON_GGUF),
    Release("ByteDance-Seed/Seed-OSS-36B-Instruct", "SeedOssForCausalLM", SEED_OSS, (of.QWEN2, of.QWEN2), CLASSES,
            forms=(PLAIN, AWQ, INT4, DYNAMIC), gguf="seed-oss", mixes=COMMON_GGUF),
)  # fmt: skip
