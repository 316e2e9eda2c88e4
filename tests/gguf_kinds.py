"""Tiny models of every architecture that GGUF files of Sluice's families have, made by transformers.

Matrices have rows of 256 numbers, which every block format divides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers  # imports the code of a family when that is first used

from tests.checkpoints import EOS, VOCAB, WINDOW, byte_fallback_tokenizer, byte_level_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_DIM = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 1024,
    "initializer_range": 0.1, "eos_token_id": EOS, "bos_token_id": 0, "pad_token_id": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip
WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1 + i / 20 for i in range(24)],
    "long_factor": [4.0] * 24, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75,
}  # fmt: skip


def _phi3() -> "PreTrainedModel":
    part = {"partial_rotary_factor": 0.75}
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **WITHOUT_HEAD_DIM, **part, sliding_window=WINDOW, original_max_position_embeddings=512,
            rope_parameters=LONG_ROPE,
        )
    )  # fmt: skip


def _gemma3() -> "PreTrainedModel":
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7}, sliding_window=WINDOW, layer_types=types, rope_parameters=GEMMA_ROPE,
            query_pre_attn_scalar=HEAD_DIM,
        )
    )  # fmt: skip


def _gpt_oss() -> "PreTrainedModel":
    """A model with YaRN, in which an end of the ramp lies between two dimensions and is not rounded."""
    rope = {**YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **experts, rope_parameters=rope))


def _gemma2() -> "PreTrainedModel":
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0}
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, **caps, sliding_window=WINDOW, query_pre_attn_scalar=HEAD_DIM)
    )


def _olmo3() -> "PreTrainedModel":
    """A model with YaRN in the layers without a window. The file states YaRN's default attention factor."""
    full = YARN_ROPE | {"attention_factor": 0.1 * math.log(4) + 1}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    types = ["sliding_attention", "full_attention"]
    return transformers.Olmo3ForCausalLM(
        transformers.Olmo3Config(**SIZES, sliding_window=WINDOW, layer_types=types, rope_parameters=rope)
    )


def _granite(**more: Any) -> dict[str, Any]:
    factors = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4}
    return {**WITHOUT_HEAD_DIM, **factors, "attention_multiplier": 0.3, **more}


def _ministral3() -> "PreTrainedModel":
    """A model whose queries are scaled up from position 32 on."""
    yarn = {"factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.3}
    return transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**SIZES | {"max_position_embeddings": 512}, rope_parameters=yarn | rope)
    )


def _glm4() -> "PreTrainedModel":
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return transformers.Glm4ForCausalLM(transformers.Glm4Config(**SIZES, attention_bias=True, rope_parameters=rope))


def _glm4_moe() -> "PreTrainedModel":
    """A model whose first layer has no experts."""
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "n_shared_experts": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            **SIZES | {"num_hidden_layers": 3}, **experts, routed_scaling_factor=1.7, first_k_dense_replace=1,
            norm_topk_prob=True, attention_bias=True, use_qk_norm=True, rope_parameters=rope,
        )
    )  # fmt: skip


def _ernie_moe() -> "PreTrainedModel":
    """A model whose first layer has no experts, and biases that change which experts are chosen."""
    experts = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 256, "moe_num_shared_experts": 2}
    sizes = {**WITHOUT_HEAD_DIM, "num_hidden_layers": 3, "moe_layer_start_index": 1, "tie_word_embeddings": False}
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**sizes, **experts))
    for name, weight in model.named_parameters():
        if name.endswith("correction_bias"):
            weight.data.normal_(0, 0.2)
    return model


LATENT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_hidden_layers": 2, "kv_lora_rank": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
}  # fmt: skip


def _deepseek_v2() -> "PreTrainedModel":
    """A model of DeepSeek-V2-Lite's kind."""
    rope = YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}
    config = transformers.DeepseekV2Config(**LATENT, q_lora_rank=None, norm_topk_prob=False, rope_parameters=rope)
    return transformers.DeepseekV2ForCausalLM(config)


def _deepseek_v3() -> "PreTrainedModel":
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    groups = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**LATENT, **groups, q_lora_rank=256, rope_parameters=rope)
    )


def _exaone4() -> "PreTrainedModel":
    sizes = SIZES | {"num_hidden_layers": 3}
    rope = LLAMA3_ROPE | {"factor": 16.0}
    return transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(**sizes, sliding_window=WINDOW, sliding_window_pattern=2, rope_parameters=rope)
    )


def _gemma4(**more: Any) -> "PreTrainedModel":
    """A model whose attention scores are not scaled, but small enough that rounding errors are not amplified."""
    rope = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = SIZES | {"global_head_dim": 128, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0}
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes | {"rope_parameters": rope} | more))
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.data.uniform_(0.2, 0.4)
        if name.endswith(("router.scale", "per_expert_scale")):
            weight.data.uniform_(0.5, 2.0)
    for name, scale in model.named_buffers():
        if name.endswith("layer_scalar"):
            scale.fill_(0.5 + 0.25 * (int(name.split(".")[2]) % 3))
    return model


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4_SMALL: dict[str, Any] = {  # like Gemma 4 E2B: per-layer embeddings; last layers share K/V, with wider MLPs
    "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_DENSE: dict[str, Any] = {  # like Gemma 4 31B: full layers use keys as values, with fewer K/V heads
    "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    **GEMMA4_DENSE, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 256, "enable_moe_block": True,
}  # fmt: skip
DELTA: dict[str, Any] = {
    **SIZES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "num_hidden_layers": 3,
    "initializer_range": 0.05,  # with larger weights, norms of small outputs would amplify rounding errors
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DELTA_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
SECTIONS = DELTA_ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}


def _cohere2() -> "PreTrainedModel":
    types = [SLIDING, SLIDING, SLIDING, FULL]
    sizes = {**WITHOUT_HEAD_DIM, "num_hidden_layers": 4}
    return transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(**sizes, sliding_window=WINDOW, layer_types=types, logit_scale=0.5)
    )


def _hunyuan() -> "PreTrainedModel":
    """A model whose rotary base is multiplied by a power of alpha."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
    return transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**SIZES, rope_parameters=rope))


def _apertus() -> "PreTrainedModel":
    """A model whose activation has parameters, which differ between layers. GGUF has them in the metadata."""
    model = transformers.ApertusForCausalLM(
        transformers.ApertusConfig(**WITHOUT_HEAD_DIM, rope_parameters=LLAMA3_ROPE, dtype="float32")
    )
    for name, parameter in model.named_parameters():
        if "alpha_" in name:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return model


def _granite_hybrid(**more: Any) -> "PreTrainedModel":
    """A model with Mamba-2 layers before and after a layer with attention."""
    sizes = {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", FULL, "linear_attention"], "mamba_n_heads": 8,
        "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32, "initializer_range": 0.05, **more,
    }  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**_granite(**sizes)))


def _lfm2() -> "PreTrainedModel":
    """A model whose first and last layers are short convolutions."""
    more = {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**WITHOUT_HEAD_DIM, **more}))


@dataclass(frozen=True)
class Kind:
    """A family and its architecture in GGUF."""

    architecture: str
    model: "Callable[[], PreTrainedModel]"
    tokenizer: Callable[[], transformers.PreTrainedTokenizerFast] = byte_level_tokenizer


KINDS = {
    "llama": Kind(
        "llama", lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE))
    ),
    "llama-biased": Kind(
        "llama",
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    ),
    "mistral": Kind(
        "llama", lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))
    ),
    "qwen2": Kind(
        "qwen2",
        lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**WITHOUT_HEAD_DIM, rope_parameters=YARN_ROPE)),
    ),
    "qwen3": Kind(
        "qwen3", lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True))
    ),
    "gemma3": Kind("gemma3", _gemma3, byte_fallback_tokenizer),
    "phi3": Kind("phi3", _phi3),
    "smollm3": Kind(
        "smollm3",
        lambda: transformers.SmolLM3ForCausalLM(
            transformers.SmolLM3Config(
                **SIZES | {"num_hidden_layers": 4}, no_rope_layer_interval=4, tie_word_embeddings=False
            )
        ),
    ),
    "qwen2-moe": Kind(
        "qwen2moe",
        lambda: transformers.Qwen2MoeForCausalLM(
            transformers.Qwen2MoeConfig(**WITHOUT_HEAD_DIM, **QWEN_EXPERTS, shared_expert_intermediate_size=512)
        ),
    ),
    "qwen3-moe": Kind(
        "qwen3moe",
        lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**SIZES, **QWEN_EXPERTS, norm_topk_prob=True)
        ),
    ),
    "mixtral": Kind(
        "llama",
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        ),
    ),
    "gpt-oss": Kind("gpt-oss", _gpt_oss),
    "gemma2": Kind("gemma2", _gemma2, byte_fallback_tokenizer),
    "gemma4": Kind("gemma4", lambda: _gemma4(**GEMMA4_SMALL), byte_fallback_tokenizer),
    "gemma4-dense": Kind("gemma4", lambda: _gemma4(**GEMMA4_DENSE), byte_fallback_tokenizer),
    "gemma4-moe": Kind("gemma4", lambda: _gemma4(**GEMMA4_EXPERTS), byte_fallback_tokenizer),
    "olmo2": Kind("olmo2", lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES))),
    "olmo3": Kind("olmo2", _olmo3),
    "glm4": Kind("glm4", _glm4),
    "glm4-moe": Kind("glm4moe", _glm4_moe),
    "deepseek-v2": Kind("deepseek2", _deepseek_v2),
    "deepseek-v3": Kind("deepseek2", _deepseek_v3),
    "granite": Kind("granite", lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**_granite()))),
    "ministral3": Kind("mistral3", _ministral3),
    "mistral-small": Kind(
        "mistral3", lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None))
    ),
    "ernie4_5": Kind(
        "ernie4_5",
        lambda: transformers.Ernie4_5ForCausalLM(
            transformers.Ernie4_5Config(**SIZES, use_bias=True, tie_word_embeddings=False)
        ),
    ),
    "exaone4": Kind("exaone4", _exaone4),
    "command-r": Kind(
        "command-r",
        lambda: transformers.CohereForCausalLM(
            transformers.CohereConfig(**WITHOUT_HEAD_DIM | {"num_hidden_layers": 4}, logit_scale=0.5)
        ),
    ),
    "cohere2": Kind("cohere2", _cohere2),
    "starcoder2": Kind(
        "starcoder2",
        lambda: transformers.Starcoder2ForCausalLM(
            transformers.Starcoder2Config(**WITHOUT_HEAD_DIM, tie_word_embeddings=False)
        ),
    ),
    "hunyuan": Kind("hunyuan-dense", _hunyuan),
    "apertus": Kind("apertus", _apertus),
    "nemotron": Kind(
        "nemotron",
        lambda: transformers.NemotronForCausalLM(transformers.NemotronConfig(**SIZES, tie_word_embeddings=False)),
    ),
    "arcee": Kind(
        "arcee", lambda: transformers.ArceeForCausalLM(transformers.ArceeConfig(**SIZES, rope_parameters=LLAMA3_ROPE))
    ),
    "lfm2": Kind("lfm2", _lfm2),
    "seed-oss": Kind(
        "seed_oss", lambda: transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**SIZES, attention_bias=True))
    ),
    "olmoe": Kind(
        "olmoe",
        lambda: transformers.OlmoeForCausalLM(
            transformers.OlmoeConfig(**SIZES | {"num_key_value_heads": 4}, num_experts=6, num_experts_per_tok=3)
        ),
    ),
    "granite-hybrid": Kind(
        "granitehybrid",
        lambda: _granite_hybrid(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=512),
    ),
    "granite-hybrid-moe": Kind(
        "granitehybrid",
        lambda: _granite_hybrid(num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=256),
    ),
    "granite-moe-shared": Kind(
        "granitemoe",
        lambda: transformers.GraniteMoeSharedForCausalLM(
            transformers.GraniteMoeSharedConfig(
                **_granite(num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=256)
            )
        ),
    ),
    "ernie4_5-moe": Kind("ernie4_5-moe", _ernie_moe),
    "gemma": Kind(
        "gemma", lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES)), byte_fallback_tokenizer
    ),
    "granite-moe": Kind(
        "granitemoe",
        lambda: transformers.GraniteMoeForCausalLM(
            transformers.GraniteMoeConfig(**_granite(num_local_experts=6, num_experts_per_tok=3))
        ),
    ),
    "qwen3_5": Kind(
        "qwen35",
        lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**DELTA, rope_parameters=SECTIONS)),
    ),
    "qwen3_5-moe": Kind(
        "qwen35moe",
        lambda: transformers.Qwen3_5MoeForCausalLM(
            transformers.Qwen3_5MoeTextConfig(
                **DELTA, **QWEN_EXPERTS, shared_expert_intermediate_size=512, rope_parameters=SECTIONS
            )
        ),
    ),
    "qwen3-next": Kind(
        "qwen3next",
        lambda: transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **DELTA, **QWEN_EXPERTS, shared_expert_intermediate_size=512, rope_parameters=DELTA_ROPE
            )
        ),
    ),
}

MIXTURES = (
    "qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "olmoe", "granite-moe", "granite-hybrid-moe", "qwen3_5-moe",
    "qwen3-next", "glm4-moe", "ernie4_5-moe", "granite-moe-shared", "deepseek-v2", "deepseek-v3",
)  # fmt: skip
