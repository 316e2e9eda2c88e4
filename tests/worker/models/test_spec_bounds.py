"""Models with sizes beyond the kernels' bounds are refused by their config alone; models at the bounds are accepted."""

from typing import Any

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.ops.native import MAX_CHOSEN, MAX_HEAD_DIM, MAX_KEY_ELEMENTS, MAX_TAPS

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
MOE: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 1000, "num_experts_per_tok": 2}
LFM: dict[str, Any] = {
    **LLAMA, "model_type": "lfm2", "head_dim": 16, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 15, "original_max_position_embeddings": 64}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (LLAMA, {"head_dim": MAX_HEAD_DIM}),
        (LLAMA, {"head_dim": 2}),
        (LLAMA, {"num_attention_heads": 256, "num_key_value_heads": 128, "head_dim": MAX_KEY_ELEMENTS // 128}),
        (MOE, {"num_experts_per_tok": MAX_CHOSEN}),
        (LFM, {"conv_L_cache": MAX_TAPS}),
        (LFM, {"conv_L_cache": 1}),
        (LLAMA, {"num_hidden_layers": 4096}),
        (LLAMA, {"rope_scaling": {**LONG, "short_factor": [1.0] * 16}}),
    ],
)
def test_config_at_a_bound_is_accepted(config: dict[str, Any], change: dict[str, Any]) -> None:
    spec_from_config({**config, **change})


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (LLAMA, {"head_dim": MAX_HEAD_DIM + 2}, ["head_dim 578", "576"]),
        (LLAMA, {"head_dim": 33}, ["head_dim 33", "even"]),
        (LLAMA, {"head_dim": -2}, ["head_dim -2"]),
        (LLAMA, {"head_dim": 0, "hidden_size": 2}, ["hidden_size 2", "num_attention_heads 4"]),
        (LLAMA, {"num_key_value_heads": 3}, ["num_key_value_heads 3", "num_attention_heads 4"]),
        (LLAMA, {"num_attention_heads": 0}, ["num_attention_heads 0"]),
        (LLAMA, {"num_attention_heads": 256, "num_key_value_heads": 256, "head_dim": 512}, ["256", "65536"]),
        (MOE, {"num_experts_per_tok": MAX_CHOSEN + 1}, ["num_experts_per_tok 257", "256"]),
        (LFM, {"conv_L_cache": MAX_TAPS + 1}, ["conv_L_cache 9", "8"]),
        (LLAMA, {"num_hidden_layers": 4097}, ["num_hidden_layers 4097", "4096"]),
        (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers 1000000000"]),
        (LLAMA, {"num_hidden_layers": 10**400}, ["num_hidden_layers of 1329 bits"]),
        (LLAMA, {"layer_types": ["full_attention"]}, ["num_hidden_layers 2", "layer_types", "1"]),
        (LLAMA, {"layer_types": ["full_attention"] * 10**6}, ["layer_types with 1000000 entries", "4096"]),
        (LLAMA, {"vocab_size": 10**9}, ["vocab_size 1000000000"]),
        (LLAMA, {"vocab_size": True}, ["vocab_size True"]),
        (LLAMA, {"hidden_size": None}, ["hidden_size null"]),
        (LLAMA, {"max_position_embeddings": 10**9}, ["max_position_embeddings 1000000000"]),
        (LLAMA, {"rms_norm_eps": 0.0}, ["rms_norm_eps 0.0"]),
        (LLAMA, {"rms_norm_eps": None}, ["rms_norm_eps null", "1e-30"]),
        (LLAMA, {"model_type": "granite", "embedding_multiplier": None}, ["embedding_multiplier null"]),
        (LLAMA, {"model_type": "granite", "residual_multiplier": None}, ["residual_multiplier null"]),
        (LLAMA, {"model_type": "granite", "attention_multiplier": None}, ["attention_multiplier null"]),
        (LLAMA, {"model_type": "starcoder2", "norm_epsilon": None}, ["norm_epsilon null"]),
        (LLAMA, {"rms_norm_eps": float("nan")}, ["rms_norm_eps nan"]),
        (LLAMA, {"rms_norm_eps": float("inf")}, ["rms_norm_eps inf"]),
        (LLAMA, {"rope_theta": -1e4}, ["rope_theta -10000.0"]),
        (LLAMA, {"rope_theta": 1.0}, ["rope_theta 1"]),
        (LLAMA, {"rope_scaling": YARN}, ["rope_theta 1"]),
        (LLAMA, {"rope_scaling": LLAMA3}, ["high_freq_factor 4", "low_freq_factor 4"]),
        (LLAMA, {"rope_scaling": LONG}, ["short_factor of 15", "16 pairs"]),
        (LLAMA, {"rope_scaling": {**LONG, "original_max_position_embeddings": 1}}, ["original_max_pos", " 1 "]),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor 0"]),
        (LLAMA, {"rope_parameters": {"full_attention": 3}}, ["rope_parameters", "full_attention", "'3'"]),
        (LLAMA, {"intermediate_size": 0}, ["intermediate_size 0"]),
        (LLAMA, {"eos_token_id": -1}, ["eos_token_id -1"]),
        (LLAMA, {"text_config": "x"}, ["text_config 'x'"]),
        (LLAMA, {"model_type": ["llama"]}, ["model_type ['llama']"]),
        (LLAMA, {"partial_rotary_factor": 2}, ["partial_rotary_factor 2"]),
    ],
)  # fmt: skip
def test_config_beyond_a_bound_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    message = refusal({**config, **change})
    assert all(word in message for word in words) and len(message) < 300, message
