"""Configs in older spellings of the hub and in transformers' newer spelling give the same spec."""

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.ops.recurrent_state import DeltaNetShape
from worker.spec import ExpertGroups, ExpertsSpec, LatentSpec, LayerSpec, RopeSpec

LLAMA32_1B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009], "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "max_window_layers": 28, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
    "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN25: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "rope_theta": 1000000.0,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
    "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {  # a multimodal config states only values that are not defaults of its text model
    "model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN15_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "router_jitter_noise": 0.1, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
}  # fmt: skip
GLM45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "qk_norm_type": "per_layer",
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
OLMOE_1B_7B: dict[str, Any] = {
    "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 50304,
}  # fmt: skip
GRANITE_3B: dict[str, Any] = {
    "model_type": "granitemoe", "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1536,
    "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072, "num_attention_heads": 24,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49155,
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN35_27B: dict[str, Any] = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 1152, "model_type": "qwen3_5"},
    "text_config": {
        "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish",
        "rms_norm_eps": 1e-06, "vocab_size": 248320,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
YARN_OF_DEEPSEEK = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
    "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
GLM47_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
    "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "dtype": "bfloat16", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
SPARSE = [QWEN3_NEXT_80B, OLMOE_1B_7B, GRANITE_3B, QWEN3_30B, QWEN15_MOE, MIXTRAL, GPT_OSS_20B]
HUB = [LLAMA32_1B, QWEN3, QWEN25, MISTRAL, GEMMA3_1B, *SPARSE]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("config", HUB, ids=lambda config: str(config["model_type"]))
def test_old_and_new_spelling_give_the_same_spec(config: dict[str, Any]) -> None:
    ours = dict(config)
    new = AutoConfig.for_model(**config).to_dict()
    assert "rope_parameters" in new and "rope_theta" not in new, "transformers no longer respells; find another oracle"
    assert spec_from_config(new) == spec_from_config(ours)


ROWS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "olmo2",
    "olmo3",
    "glm4",
    "granite",
    "ministral3",
    "seed_oss",
    "ernie4_5",
    "exaone4",
    "cohere",
    "cohere2",
    "starcoder2",
    "hunyuan_v1_dense",
    "apertus",
    "nemotron",
    "arcee",
    "lfm2",
    "lfm2_moe",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "exaone_moe",
    "granitemoeshared",
    "cohere2_moe",
    "flex_olmo",
    "afmoe",
    "mellum",
    "hy_v3",
    "solar_open",
    "gemma",
    "vaultgemma",
    "glm",
    "helium",
    "internlm3",
    "iquestcoder",
    "cwm",
    "ministral",
    "hyperclovax",
    "stablelm",
    "jais2",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
    "minicpm3",
    "youtu",
)


MULTIPLES = {"ernie4_5_moe": 2560, "iquestcoder": 5120, "jais2": 3328}  # hidden sizes that their heads divide


@pytest.mark.parametrize("model_type", [*(config["model_type"] for config in HUB), *ROWS])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config.json omits default values, so our defaults must equal transformers'."""
    hidden = MULTIPLES.get(model_type, 1536)
    sizes = {"vocab_size": 1000, "num_hidden_layers": 9, "hidden_size": hidden, "intermediate_size": 256}
    sizes |= sizes_without_defaults(model_type)
    theirs = AutoConfig.for_model(model_type, **sizes).to_dict()
    ours = spec_from_config({"model_type": model_type, **sizes})
    assert ours == spec_from_config({**theirs, "dtype": "float32"})


def sizes_without_defaults(model_type: str) -> dict[str, Any]:
    """Returns sizes for which the family's row has no default, or one that does not divide the other sizes."""
    if model_type == "deepseek_v2":
        return {"num_experts_per_tok": 6}
    return {"num_attention_heads": 32} if model_type in ("llama", "mistral", "minicpm3") else {}


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (QWEN3_30B, ExpertsSpec(count=128, chosen=8, intermediate_size=768, normalized=True)),
        (QWEN15_MOE, ExpertsSpec(count=60, chosen=4, intermediate_size=1408, normalized=False, shared_size=5632,
                                 shared_gated=True)),
        (MIXTRAL, ExpertsSpec(count=8, chosen=2, intermediate_size=14336, normalized=True)),
        (QWEN3_NEXT_80B, ExpertsSpec(count=512, chosen=10, intermediate_size=512, normalized=True, shared_size=512,
                                     shared_gated=True)),
        (OLMOE_1B_7B, ExpertsSpec(count=64, chosen=8, intermediate_size=1024, normalized=False)),
        (GRANITE_3B, ExpertsSpec(count=40, chosen=8, intermediate_size=512, normalized=True)),
        (MINIMAX_M2, ExpertsSpec(count=256, chosen=8, intermediate_size=1536, normalized=True, sigmoid=True,
                                 choice_bias=True)),
        (GPT_OSS_20B, ExpertsSpec(count=32, chosen=4, intermediate_size=2880, normalized=True, router_bias=True,
                                  bias=True)),
    ],
    ids=lambda value: str(value.get("model_type", "")) if isinstance(value, dict) else "",
)  # fmt: skip
def test_experts(config: dict[str, Any], experts: ExpertsSpec) -> None:
    spec = spec_from_config(config)
    assert spec.experts == experts and all(layer.sparse for layer in spec.layers)
    assert spec_from_config(LLAMA32_1B).experts is None


def test_sizes_of_models_with_sigmoid_scores() -> None:
    air, minimax = spec_from_config(GLM45_AIR), spec_from_config(MINIMAX_M2)
    assert [layer.sparse for layer in air.layers] == [False] + [True] * 45 and not air.qk_norm
    assert air.experts == ExpertsSpec(
        count=128, chosen=8, intermediate_size=1408, normalized=True, sigmoid=True, choice_bias=True, shared_size=1408
    )
    assert air.ropes[0].rotated == minimax.ropes[0].rotated == 64 and minimax.whole_qk_norm


def test_sizes_of_models_with_latent_attention() -> None:
    lite, v3, flash = map(spec_from_config, (DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM47_FLASH))
    assert lite.latent == LatentSpec(rank=512, rope=64, plain=128, value=128)
    assert v3.latent == replace(lite.latent, query_rank=1536)
    assert flash.latent == LatentSpec(rank=512, rope=64, plain=192, value=256, query_rank=768)
    for spec, sparse in ((lite, 26), (v3, 58), (flash, 46)):
        assert {spec.kv_shape(layer) for layer in spec.layers} == {(1, 576)} and spec.kv_tensors == 1
        assert sum(layer.sparse for layer in spec.layers) == sparse and spec.ropes[0].neighbours
    assert lite.experts == ExpertsSpec(
        count=64, chosen=6, intermediate_size=1408, normalized=False, shared_size=2816, groups=None
    )
    assert v3.experts == ExpertsSpec(
        count=256, chosen=8, intermediate_size=2048, normalized=True, sigmoid=True, choice_bias=True, factor=2.5,
        shared_size=2048, groups=ExpertGroups(8, 4, 2),
    )  # fmt: skip
    assert lite.attention_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert flash.attention_scale == 256**-0.5 and flash.ropes[0].theta == 1e6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 513}, ["kv_lora_rank 513", "even"]),
        ({"kv_lora_rank": 1024}, ["kv_lora_rank 1024", "576"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank"]),
        ({"qk_rope_head_dim": 0}, ["qk_rope_head_dim 0"]),
        ({"v_head_dim": -1}, ["v_head_dim -1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "qk_rope_head_dim"]),
        ({"rope_interleave": 3}, ["rope_interleave 3"]),
    ],
)
def test_impossible_latent_attention_is_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**DEEPSEEK_V3, **change})
    assert all(word in str(caught.value) for word in words), caught.value


def test_number_of_experts_in_both_spellings() -> None:
    """transformers 5 renamed `num_experts` of Qwen3-MoE to `num_local_experts`."""
    new = {name: value for name, value in QWEN3_30B.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert spec_from_config(new) == spec_from_config(QWEN3_30B)
    renamed = {name: value for name, value in MIXTRAL.items() if name != "num_local_experts"} | {"num_experts": 8}
    assert spec_from_config(renamed) == spec_from_config(MIXTRAL)


def test_some_layers_are_dense() -> None:
    def dense(**change: Any) -> list[int]:
        layers = spec_from_config({**QWEN3_30B, **change}).layers
        return [i for i, layer in enumerate(layers) if not layer.sparse]

    assert dense() == [] and dense(mlp_only_layers=None) == []
    assert dense(mlp_only_layers=[0, 47]) == [0, 47]
    assert dense(decoder_sparse_step=2) == list(range(0, 48, 2))
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == [0, 1, *range(2, 48, 2)]


def test_gpt_oss() -> None:
    spec = spec_from_config(GPT_OSS_20B)
    assert [layer.window for layer in spec.layers] == [128, 0] * 12
    without = {name: value for name, value in GPT_OSS_20B.items() if name not in ("layer_types", "rope_scaling")}
    assert spec_from_config(without) == spec, "the defaults are those of the published model"
    (rope,) = spec.ropes
    assert (rope.kind, rope.factor, rope.original_positions, rope.truncate) == ("yarn", 32.0, 4096, False)
    assert spec.sinks and spec.qkv_bias and spec.o_bias and not spec.mlp_bias and not spec.qk_norm
    assert spec.activation == "clamped_swiglu" and spec.max_positions == 131072
    assert spec.stored is not None and spec.stored.kind == "mxfp4"


def test_olmoe_and_granite() -> None:
    spec = spec_from_config(OLMOE_1B_7B)
    assert spec.qk_norm and spec.whole_qk_norm and spec.norm_eps == 1e-5
    spec = spec_from_config(GRANITE_3B)
    assert (spec.attention_scale, spec.embed_scale, spec.residual_scale) == (0.015625, 12.0, 0.22)
    assert spec.logit_scale == pytest.approx(1 / 6) and not spec.qk_norm


def test_recurrent_layers() -> None:
    spec = spec_from_config(QWEN35_27B)
    assert spec.model_type == "qwen3_5_text" and spec.experts is None and spec.eos_ids == (248044,)
    shape = DeltaNetShape(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4)
    assert {(layer.mixer, layer.state) for layer in spec.layers} == {("delta_net", shape), ("attention", None)}
    assert [i for i, layer in enumerate(spec.layers) if not layer.recurrent] == list(range(3, 64, 4))
    assert spec.ropes == (RopeSpec("default", 1e7, rotated=64),), "sections are equal in a text"
    assert spec.attention_gate and spec.norm_offset and spec.qk_norm and not spec.whole_qk_norm
    text = QWEN35_27B["text_config"]
    assert spec_from_config(text) == spec
    without = {name: value for name, value in text.items() if name != "layer_types"}
    assert spec_from_config(without) == spec, "every fourth layer has attention"
    assert {layer.recurrent for layer in spec_from_config(LLAMA32_1B).layers} == {False}
    assert {layer.mixer for layer in spec_from_config(LLAMA32_1B).layers} == {"attention"}


def test_qwen3_next() -> None:
    spec = spec_from_config(QWEN3_NEXT_80B)
    state = spec.layers[0].state
    assert isinstance(state, DeltaNetShape) and state.value_heads == 32
    assert sum(layer.recurrent for layer in spec.layers) == 36
    assert spec.ropes == (RopeSpec("default", 1e7, rotated=64),)
    dense = spec_from_config({**QWEN3_NEXT_80B, "mlp_only_layers": [0, 3]})
    assert [i for i, layer in enumerate(dense.layers) if not layer.sparse] == [0, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 40}, ["linear_num_key_heads 16", "linear_num_value_heads 40"]),
        ({"linear_conv_kernel_dim": 0}, ["linear_conv_kernel_dim 0"]),
        ({"linear_num_key_heads": 0}, ["linear_num_key_heads 0"]),
        ({"hidden_act": "gelu_new"}, ["'gelu_new'", "silu"]),
        ({"attn_output_gate": False}, ["attn_output_gate", "False", "True"]),
        ({"layer_types": ["linear_attention"] * 48}, ["full_attention"]),
        ({"layer_types": ["sliding_attention"] * 48}, ["'sliding_attention'", "linear_attention"]),
        ({"full_attention_interval": 0}, ["full_attention_interval"]),
    ],
)
def test_impossible_recurrent_layers_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**QWEN3_NEXT_80B, **change})
    assert all(word in str(caught.value) for word in words), caught.value


def test_windows_of_experts() -> None:
    used = {"use_sliding_window": True, "sliding_window": 100}
    assert {layer.window for layer in spec_from_config({**QWEN3_30B, **used}).layers} == {100}
    windows = [layer.window for layer in spec_from_config({**QWEN15_MOE, **used, "max_window_layers": 4}).layers]
    assert windows == [100, 0, 100] + [0] * 21


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 129}, ["129 of 128 experts"]),
        (QWEN3_30B, {"num_experts": 0}, ["8 of 0 experts"]),
        (QWEN3_30B, {"num_experts_per_tok": 0}, ["0 of 128 experts"]),
        (QWEN3_30B, {"num_experts_per_tok": -1}, ["-1 of 128 experts"]),
        (QWEN3_30B, {"scoring_func": "sigmoid"}, ["scoring_func", "'sigmoid'", "'softmax'"]),
        (QWEN3_30B, {"moe_intermediate_size": 0}, ["moe_intermediate_size"]),
        (QWEN3_30B, {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        (GPT_OSS_20B, {"swiglu_limit": 10.0}, ["swiglu_limit", "10.0", "7.0"]),
        (GPT_OSS_20B, {"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.0", "1.702"]),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, ["'gelu'"]),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, ["clip_qkv", "8.0", "None"]),
        (GRANITE_3B, {"logits_scaling": 0}, ["logits_scaling"]),
        (GLM45_AIR, {"n_group": 7}, ["n_group", "7", "128 experts", "equal groups"]),
        (GLM45_AIR, {"n_group": 128}, ["n_group", "128", "at least 2"]),
        (GLM45_AIR, {"n_group": 32, "topk_group": 1}, ["topk_group 1 of 32", "8 experts"]),
        (GLM45_AIR, {"n_group": 4, "topk_group": 5}, ["topk_group 5 of 4"]),
        (MINIMAX_M2, {"n_group": 8}, ["n_group 8", "1"]),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, ["topk_method 'noaux_tc'", "'greedy'"]),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, ["norm_topk_prob"]),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, ["topk_method 'greedy'", "'noaux_tc'"]),
        (GLM47_FLASH, {"mlp_layer_types": ["dense"] * 5}, ["mlp_layer_types"]),
        (GLM47_FLASH, {"mlp_layer_types": ["wide"] * 47}, ["mlp_layer_types 'wide'"]),
        (GLM45_AIR, {"n_routed_experts": None}, ["8 of 0 experts"]),
        (GLM45_AIR, {"routed_scaling_factor": 0}, ["routed_scaling_factor"]),
        (MINIMAX_M2, {"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        (MINIMAX_M2, {"rotary_dim": 0}, ["rotary_dim"]),
        (MIXTRAL, {"model_type": "deepseek_v32"}, ["'deepseek_v32'", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"]),
    ],
)  # fmt: skip
def test_impossible_experts_are_named(config: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**config, **change})
    assert all(word in str(caught.value) for word in words), caught.value


ERNIE_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "vocab_size": 103424,
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_head_dim": 128, "eos_token_id": 127960, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768,
    "model_type": "hunyuan_v1_moe", "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32,
    "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "torch_dtype": "bfloat16",
    "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip
K_EXAONE: dict[str, Any] = {
    "model_type": "exaone_moe", "hidden_size": 6144, "head_dim": 128, "num_hidden_layers": 8,
    "first_k_dense_replace": 1, "num_experts": 128, "sliding_window_pattern": "LLLG", "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}  # fmt: skip


def test_experts_chosen_by_a_softmax_and_a_bias() -> None:
    spec = spec_from_config(ERNIE_21B)
    assert [layer.sparse for layer in spec.layers] == [False] + [True] * 27 and spec.draft_layers == 1
    assert spec.experts == ExpertsSpec(
        count=64, chosen=6, intermediate_size=1536, normalized=True, choice_bias=True, shared_size=3072
    )
    last = spec_from_config({**ERNIE_21B, "moe_layer_end_index": -1, "moe_layer_interval": 2})
    assert [i for i, layer in enumerate(last.layers) if layer.sparse] == list(range(1, 28, 2))


def test_a_list_with_the_same_number_for_every_layer_is_that_number() -> None:
    spec = spec_from_config(HUNYUAN_A13B)
    assert spec.experts == ExpertsSpec(count=64, chosen=8, intermediate_size=3072, normalized=True, shared_size=3072)
    assert spec_from_config({**HUNYUAN_A13B, "moe_topk": 8, "num_experts": [64] * 32}) == spec


def test_layers_of_exaone_with_experts() -> None:
    """A pattern of windows in letters is not read, because configs list the types of the layers beside it."""
    spec = spec_from_config(K_EXAONE)
    assert [layer.window for layer in spec.layers] == [4096, 4096, 4096, 0] * 2
    assert [spec.ropes[layer.rope].kind for layer in spec.layers[:4]] == ["default"] * 3 + ["none"]
    assert [layer.sparse for layer in spec.layers] == [False] + [True] * 7 and spec.pre_norms and not spec.post_norms
    listed = ["dense", "sparse"] * 4
    assert [layer.sparse for layer in spec_from_config({**K_EXAONE, "mlp_layer_types": listed}).layers] == [
        False,
        True,
    ] * 4


COHERE2_MOE: dict[str, Any] = {
    "model_type": "cohere2_moe", "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_shared_experts": 2, "first_k_dense_replace": 2,
    "prefix_dense_intermediate_size": 256,
}  # fmt: skip


def test_cohere_with_experts() -> None:
    spec, of = spec_from_config(COHERE2_MOE), ExpertsSpec(
        count=8, chosen=2, intermediate_size=96, normalized=True, shared_size=192, averaged=True, factor=0.5
    )  # fmt: skip
    assert spec.layer_norm and spec.parallel and spec.intermediate_size == 256 and spec.experts == of
    assert [layer.window for layer in spec.layers] == [0, 0, 4096, 4096, 4096, 0]
    assert [spec.ropes[layer.rope].kind for layer in spec.layers] == ["default"] * 5 + ["none"]
    plain = {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "shared_expert_combination_strategy": "sum"}
    spec = spec_from_config({**COHERE2_MOE, **plain, "rms_norm_eps": 1e-6, "num_shared_experts": 0})
    assert spec.experts == ExpertsSpec(count=8, chosen=2, intermediate_size=96, normalized=False, sigmoid=True)
    assert not spec.layer_norm and spec.norm_eps == 1e-6


NEMOTRON_9B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 128, "conv_kernel": 4,
    "eos_token_id": 12, "expand": 2, "head_dim": 128, "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 80, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 56,
    "num_key_value_heads": 8, "residual_in_fp32": False, "rms_norm_eps": 1e-05, "ssm_state_size": 128,
    "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")], "torch_dtype": "bfloat16",
    "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip
NEMOTRON_30B: dict[str, Any] = {
    **NEMOTRON_9B, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688, "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip


def test_mixers_and_networks_that_follow_each_other_are_one_layer() -> None:
    """56 blocks are 31 layers: 25 networks, and six mixers that another mixer follows."""
    spec = spec_from_config(NEMOTRON_9B)
    assert len(spec.layers) == 31 and sum(layer.bare for layer in spec.layers) == 6
    mixers = "".join("M" if layer.recurrent else "*" for layer in spec.layers)
    assert mixers == NEMOTRON_9B["hybrid_override_pattern"].replace("-", "")
    assert not spec.gated and spec.activation == "relu2" and {rope.kind for rope in spec.ropes} == {"none"}
    listed = {"M": "mamba", "*": "attention", "-": "mlp"}
    blocks = [listed[letter] for letter in NEMOTRON_9B["hybrid_override_pattern"]]
    assert spec_from_config({**NEMOTRON_9B, "hybrid_override_pattern": None, "layers_block_type": blocks}) == spec


def test_nemotron_with_experts() -> None:
    spec = spec_from_config(NEMOTRON_30B)
    assert sum(layer.sparse for layer in spec.layers) == 23 and not any(
        layer.sparse for layer in spec.layers if layer.bare
    )
    assert {layer.feed_forward for layer in spec.layers} == {"experts", "none"}
    assert spec.experts == ExpertsSpec(
        count=128, chosen=6, intermediate_size=1856, normalized=True, sigmoid=True, choice_bias=True, factor=2.5,
        shared_size=3712,
    )  # fmt: skip


STABLELM = {"model_type": "stablelm"}


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (ERNIE_21B, {"use_bias": True}, ["use_bias", "experts"]),
        (ERNIE_21B, {"moe_norm_min": 0.1}, ["moe_norm_min 0.1"]),
        (ERNIE_21B, {"moe_layer_interval": 0}, ["moe_layer_interval 0"]),
        (ERNIE_21B, {"moe_layer_start_index": None}, ["moe_layer_start_index null"]),
        (ERNIE_21B, {"moe_k": 65}, ["65 of 64 experts", "moe_k"]),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + [4]}, ["moe_topk", "differ"]),
        (HUNYUAN_A13B, {"moe_topk": None}, ["moe_topk None"]),
        (HUNYUAN_A13B, {"num_experts": []}, ["num_experts []"]),
        (QWEN3_30B, {"num_experts": [8, 8]}, ["num_experts [8, 8]", "one number"]),
        (QWEN3_30B, {"moe_intermediate_size": [96, 96]}, ["moe_intermediate_size [96, 96]"]),
        (GLM45_AIR, {"moe_intermediate_size": [96, 96]}, ["intermediate_size"]),
        (K_EXAONE, {"layer_types": None}, ["sliding_window_pattern 'LLLG'"]),
        (K_EXAONE, {"mlp_layer_types": ["deep"] * 8}, ["mlp_layer_types 'deep'"]),
        (K_EXAONE, {"mlp_layer_types": ["sparse"]}, ["mlp_layer_types"]),
        (COHERE2_MOE, {"expert_selection_fn": "hash"}, ["expert_selection_fn 'hash'", "softmax, sigmoid"]),
        (COHERE2_MOE, {"shared_expert_combination_strategy": None}, ["shared_expert_combination_strategy None"]),
        (STABLELM, {"qk_layernorm": True}, ["qk_layernorm True"]),
        (NEMOTRON_9B, {"hybrid_override_pattern": "-M*"}, ["layer 0", "no mixer precedes it"]),
        (NEMOTRON_9B, {"hybrid_override_pattern": "M--*"}, ["layer 2", "no mixer precedes it"]),
        (NEMOTRON_9B, {"hybrid_override_pattern": "MX*"}, ["hybrid_override_pattern 'X'", "M, *, E, -"]),
        (NEMOTRON_9B, {"hybrid_override_pattern": None}, ["lacks", "hybrid_override_pattern"]),
        (NEMOTRON_9B, {"hybrid_override_pattern": "M-M-"}, ["full_attention"]),
        (NEMOTRON_9B, {"layers_block_type": ["mamba", "conv"]}, ["layers_block_type 'conv'"]),
        (NEMOTRON_9B, {"time_step_limit": [0.01, 1.0]}, ["time_step_limit"]),
        (NEMOTRON_9B, {"mamba_hidden_act": "gelu"}, ["mamba_hidden_act 'gelu'"]),
        (NEMOTRON_9B, {"n_groups": 7}, ["mamba_n_groups 7"]),
        (NEMOTRON_30B, {"moe_latent_size": 1024}, ["moe_latent_size 1024"]),
    ],
)
def test_settings_of_later_rows_that_are_not_supported_are_named(
    config: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**config, **change})
    assert all(word in str(caught.value) for word in words), caught.value


def test_small_settings_of_dense_rows() -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 64}
    gemma = spec_from_config({"model_type": "gemma", "hidden_act": "gelu"})
    assert gemma.activation == "gelu_tanh" and gemma.norm_offset and gemma.embed_scale == 3072**0.5
    assert spec_from_config({"model_type": "internlm3", "qkv_bias": True, "bias": True}).mlp_bias
    clova = spec_from_config({"model_type": "hyperclovax", **sizes, "logits_scaling": 0.25, "use_post_norm": False})
    assert (clova.logit_scale, clova.attention_scale, clova.post_norms) == (0.25, 64**-0.5, False)
    assert spec_from_config({**STABLELM, "use_parallel_residual": True}).parallel


def test_llama() -> None:
    spec = spec_from_config(LLAMA32_1B)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.qkv_size) == (32, 8, 64, 3072)
    assert spec.ropes == (RopeSpec("llama3", 500000.0, 32.0, 1.0, 4.0, 8192),)
    assert set(spec.layers) == {LayerSpec(window=0, rope=0)}
    assert not (spec.norm_offset or spec.post_norms or spec.qk_norm)
    assert not (spec.qkv_bias or spec.o_bias or spec.mlp_bias)
    assert spec.tied and spec.eos_ids == (128001, 128008, 128009) and spec.dtype == "bfloat16"
    assert spec.attention_scale == 64**-0.5


def test_biases_follow_the_config() -> None:
    spec = spec_from_config({**LLAMA32_1B, "attention_bias": True, "mlp_bias": True})
    assert spec.qkv_bias and spec.o_bias and spec.mlp_bias
    spec = spec_from_config(QWEN25)
    assert spec.qkv_bias and not spec.o_bias and not spec.mlp_bias and not spec.qk_norm


def test_omitted_sizes_follow_from_others() -> None:
    config = {**LLAMA32_1B, "head_dim": None, "num_key_value_heads": None, "hidden_size": 1024}
    spec = spec_from_config(config)
    assert (spec.head_dim, spec.kv_heads) == (32, 32)
    assert spec_from_config(MISTRAL).head_dim == 128


def test_windows() -> None:
    assert {layer.window for layer in spec_from_config(MISTRAL).layers} == {4096}
    assert {layer.window for layer in spec_from_config({**MISTRAL, "sliding_window": None}).layers} == {0}
    windowed = {**QWEN3, "use_sliding_window": True, "sliding_window": 1000, "max_window_layers": 20}
    assert [layer.window for layer in spec_from_config(windowed).layers] == [0] * 20 + [1000] * 8


def test_gemma3_has_full_attention_in_every_sixth_layer() -> None:
    spec = spec_from_config(GEMMA3_1B)
    assert [i for i, layer in enumerate(spec.layers) if not layer.window] == [5, 11, 17, 23]
    local, everywhere = spec.ropes[spec.layers[0].rope], spec.ropes[spec.layers[5].rope]
    assert (local, everywhere) == (RopeSpec("default", 10000.0), RopeSpec("default", 1000000.0))
    assert spec.norm_offset and spec.post_norms and spec.qk_norm and spec.tied
    assert spec.activation == "gelu_tanh" and spec.embed_scale == 1152**0.5 and spec.attention_scale == 1 / 16


def test_gemma3_multimodal_gives_its_text_model() -> None:
    spec = spec_from_config(GEMMA3_4B)
    assert (spec.model_type, spec.hidden_size, spec.heads, spec.kv_heads) == ("gemma3_text", 2560, 8, 4)
    assert spec.ropes[spec.layers[5].rope] == RopeSpec("linear", 1000000.0, 8.0), "only layers that see everything"
    assert spec.ropes[spec.layers[0].rope] == RopeSpec("default", 10000.0)
    assert spec.eos_ids == (1, 106) and spec.dtype == "bfloat16"


def test_yarn_in_both_spellings() -> None:
    old = spec_from_config({**QWEN3, "rope_scaling": {**YARN, "type": "yarn"}})
    new = spec_from_config({**QWEN3, "rope_parameters": {**YARN, "rope_theta": 1000000}, "rope_theta": 1.0})
    assert old == new and old.ropes[0].kind == "yarn" and old.ropes[0].original_positions == 32768


def test_longrope_is_served_up_to_its_original_positions() -> None:
    """Up to the original positions, dynamic NTK changes nothing, and longrope uses its first list of factors."""
    plain = {**LLAMA32_1B, "rope_scaling": None}
    assert spec_from_config({**plain, "rope_scaling": {"type": "dynamic", "factor": 2.0}}) == spec_from_config(plain)
    factors = {"short_factor": [1.0] * 32, "long_factor": [9.0] * 32, "original_max_position_embeddings": 4096}
    spec = spec_from_config({**plain, "rope_scaling": {"type": "longrope", **factors}})
    assert spec.max_positions == 4096 and spec.ropes[0].factors == (1.0,) * 32
    assert spec.ropes[0].magnitude == pytest.approx((1 + 5 / 12) ** 0.5), "131072 / 4096 is 2^5, 4096 2^12"
    assert spec_from_config({**plain, "rope_scaling": {"type": "su", **factors}}) == spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "gemma3_text", "llama", "qwen3"]),
        ({"model_type": None}, ["None", "llama"]),
        ({"rope_scaling": {"type": "spiral", "turns": 3}}, ["'spiral'", "yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["short_factor"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "generate text"]),
        ({"model_type": "mistral3", "text_config": {"model_type": "mamba"}}, ["'mistral3'", "'mamba'"]),
        ({"model_type": "llama", "vision_config": "x"}, ["vision_config 'x'", "an object"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"hidden_act": "relu"}, ["'relu'", "silu"]),
        ({"model_type": "cohere2", "logit_scale": None}, ["logit_scale None"]),
        ({"hidden_act": "xielu"}, ["'xielu'", "gate"]),
        ({"model_type": "longcat_flash"}, ["'longcat_flash'", "ministral3", "cohere2"]),
        ({"layer_types": ["linear_attention"] * 16}, ["'linear_attention'", "full_attention"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["'float8_e4m3fn'", "bfloat16"]),
    ],
)
def test_unsupported_settings_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**LLAMA32_1B, **change})
    assert all(word in str(caught.value) for word in words)


def test_missing_size_is_named() -> None:
    config = {name: value for name, value in LLAMA32_1B.items() if name != "hidden_size"}
    with pytest.raises(UnsupportedModel, match="'hidden_size'"):
        spec_from_config(config)
