"""Kinds of recurrent layers, and the sizes of LFM2's and Granite's."""

from typing import Any

import pytest

from worker.kernels.mamba2 import Mamba2Shape
from worker.kernels.short_conv import ShortConvShape
from worker.model.checkpoint import UnsupportedModel
from worker.model.families import spec_from_config

LFM2_1B: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}  # fmt: skip


GRANITE4_TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 1536, "intermediate_size": 512, "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4,
    "logits_scaling": 6, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 10, "num_key_value_heads": 4, "num_local_experts": 64,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip


def test_granite_has_mamba_layers_experts_and_a_shared_expert() -> None:
    spec = spec_from_config(GRANITE4_TINY)
    assert spec.recurrent == Mamba2Shape(heads=48, head_dim=64, groups=1, state_size=128, taps=4)
    assert [i for i, layer in enumerate(spec.layers) if not layer.recurrent] == [5]
    assert spec.experts is not None and (spec.experts.count, spec.experts.intermediate_size) == (64, 512)
    assert spec.experts.shared_size == 1024 and not spec.experts.shared_gated and spec.experts.normalized
    assert [rope.kind for rope in spec.ropes] == ["none"] and spec.residual_scale == 0.22
    assert spec_from_config({**GRANITE4_TINY, "mamba_d_head": "auto"}) == spec


def test_granite_may_have_attention_alone_and_no_experts() -> None:
    change = {"num_local_experts": 0, "layer_types": ["attention"] * 10, "position_embedding_type": "rope"}
    spec = spec_from_config({**GRANITE4_TINY, **change})
    assert spec.recurrent is None and spec.experts is None and spec.intermediate_size == 1024
    assert [rope.kind for rope in spec.ropes] == ["default"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_n_heads": 40}, ["mamba_n_heads 40"]),
        ({"mamba_n_groups": 7}, ["mamba_n_groups 7"]),
        ({"mamba_conv_bias": False}, ["mamba_conv_bias", "False", "True"]),
        ({"mamba_proj_bias": True}, ["mamba_proj_bias", "True", "False"]),
        ({"time_step_limit": [0.0, 0.1]}, ["time_step_limit"]),
        ({"layer_types": ["mamba"] * 10}, ["full_attention"]),
    ],
)
def test_impossible_settings_of_granite_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**GRANITE4_TINY, **change})
    assert all(word in str(caught.value) for word in words), caught.value


def test_lfm2_has_short_convolutions() -> None:
    spec = spec_from_config(LFM2_1B)
    assert spec.recurrent == ShortConvShape(2048, 3) and spec.tied and spec.qk_norm and spec.norm_eps == 1e-5
    assert [i for i, layer in enumerate(spec.layers) if not layer.recurrent] == [2, 5, 8, 10, 12, 14]
    assert spec.intermediate_size == 8192, "two thirds of 12288"
    types = ["conv", "conv", "full_attention"] * 5 + ["conv"]
    newer = {name: value for name, value in LFM2_1B.items() if name not in ("full_attn_idxs", "block_ff_dim")}
    newer |= {"layer_types": types, "intermediate_size": 12288}
    spec = spec_from_config(newer)
    assert spec.intermediate_size == 8192 and [layer.recurrent for layer in spec.layers] == [t == "conv" for t in types]


def test_width_of_the_feed_forward() -> None:
    def width(**change: Any) -> int:
        return spec_from_config({**LFM2_1B, **change}).intermediate_size

    assert width(block_auto_adjust_ff_dim=False) == 12288
    assert width(block_ff_dim=7000) == 4864, "4666, rounded up to a multiple of 256"
    assert width(block_ff_dim=7000, block_ffn_dim_multiplier=None) == 4666
    assert width(block_ffn_dim_multiplier=1.3) == 10752


def test_untied_by_the_older_name() -> None:
    assert not spec_from_config({**LFM2_1B, "tie_embedding": False}).tied


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv_L_cache": 0}, ["conv_L_cache 0"]),
        ({"conv_bias": True}, ["conv_bias", "True", "False"]),
        ({"layer_types": ["conv"] * 16}, ["full_attention"]),
        ({"layer_types": ["linear_attention"] * 16}, ["'linear_attention'", "conv"]),
        ({"model_type": "mamba2"}, ["'mamba2'", "lfm2"]),
    ],
)
def test_impossible_settings_are_named(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**LFM2_1B, **change})
    assert all(word in str(caught.value) for word in words), caught.value
