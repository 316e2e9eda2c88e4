"""The sizes of Granite's Mamba-2 layers, and the values that its configs may have."""

from typing import Any

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.ops.recurrent_state import Mamba2Shape

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
    assert spec.layers[0].state == Mamba2Shape(heads=48, head_dim=64, groups=1, state_size=128, taps=4)
    assert [i for i, layer in enumerate(spec.layers) if not layer.recurrent] == [5]
    assert spec.experts is not None and (spec.experts.count, spec.experts.intermediate_size) == (64, 512)
    assert spec.experts.shared_size == 1024 and not spec.experts.shared_gated and spec.experts.normalized
    assert [rope.kind for rope in spec.ropes] == ["none"] and spec.residual_scale == 0.22
    assert spec_from_config({**GRANITE4_TINY, "mamba_d_head": "auto"}) == spec


def test_granite_may_have_attention_alone_and_no_experts() -> None:
    change = {"num_local_experts": 0, "layer_types": ["attention"] * 10, "position_embedding_type": "rope"}
    spec = spec_from_config({**GRANITE4_TINY, **change})
    assert not spec.recurrent and spec.experts is None and spec.intermediate_size == 1024
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
