"""The supported model families. Each is a row of defaults and switches, from which families.py makes a ModelSpec."""

from collections.abc import Mapping

from worker.model.families.family_defaults import (
    APERTUS,
    APERTUS_SCALING,
    ARCEE,
    COHERE,
    DOTS1,
    ERNIE,
    EXAONE4,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    GLM4,
    GLM4_MOE,
    GPT_OSS,
    GPT_OSS_SCALING,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    HUNYUAN,
    LFM2,
    LFM2_MOE,
    MINIMAX_M2,
    MINISTRAL3,
    MINISTRAL3_SCALING,
    MIXTRAL,
    NEMOTRON,
    OLMO,
    OLMOE,
    PHI3,
    QWEN,
    QWEN2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)
from worker.model.families.gemma4_layers import gemma4_layers
from worker.model.family import (
    CONV,
    LINEAR,
    Family,
    FamilyExperts,
    Recurrence,
    always,
    always_biased,
    as_attention_bias_without_output,
    as_qkv_bias,
    as_two_settings,
    as_use_bias,
    as_use_expert_bias,
    conv_but_listed,
    full_every_nth,
    granite_hybrid_settings,
    lfm2_sizes,
    rotated_part,
    rotates_but_every_nth,
    rotates_if_stated,
    rotates_where_windowed,
    shared_expert_size,
    sparse_after_dense_layers,
    sparse_after_first,
    sparse_by_step,
    sparse_if_enabled,
    sparse_if_there_are_experts,
    window_but_every_nth,
    window_but_every_sixth_and_last,
    window_everywhere,
    window_everywhere_if_used,
    window_from_layer,
    window_in_every_other,
    window_in_every_other_first,
    window_where_nothing_rotates,
)

DELTA_RULE = Recurrence(LINEAR, "delta_net")
SHORT_CONV = Recurrence(CONV, "short_conv")
MAMBA2 = Recurrence(LINEAR, "mamba2")
SIGMOID_EXPERTS = FamilyExperts(  # GLM-4.5, dots.llm1
    "moe_intermediate_size", None, sparse_after_first, sigmoid=True, factor="routed_scaling_factor", choice_bias=always,
    shared_size="shared_expert_intermediate_size", shared_gated=False,
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
        qk_norm=True, value_norm=True, scale_embeddings=True, layer_scales=True, layer_inputs=True,
        experts=FamilyExperts("moe_intermediate_size", normalized=True, sparse=sparse_if_enabled, beside_mlp=True),
        names={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    ),
    "gemma4_unified_text": Family(
        GEMMA4_UNIFIED, layer_types=window_but_every_sixth_and_last, layer_details=gemma4_layers, post_norms=True,
        qk_norm=True, value_norm=True, scale_embeddings=True, layer_scales=True, layer_inputs=True,
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
    "gpt_oss": Family(
        GPT_OSS, layer_types=window_in_every_other, scaling=GPT_OSS_SCALING, sinks=True, activation="clamped_swiglu",
        experts=FamilyExperts("intermediate_size", normalized=True, biases=True),
    ),
}  # fmt: skip
