"""Rotary tables of every kind agree with transformers'."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.models.config import spec_from_config
from worker.models.decoder import query_scales, tables
from worker.spec import QueryScaling, RopeSpec

POSITIONS, HEAD_DIM = 5000, 64
STRETCHED = {"rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 1024}
SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    {"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", **STRETCHED},
    {"rope_type": "yarn", **STRETCHED, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", **STRETCHED, "attention_factor": 1.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings["rope_type"]))
def test_rope_tables_equal_transformers(settings: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=HEAD_DIM, max_position_embeddings=4096,
        rope_parameters=dict(settings),
    )  # fmt: skip
    embedding = LlamaRotaryEmbedding(config)
    true_cos, true_sin = embedding(torch.zeros(1), torch.arange(POSITIONS)[None])
    (rope,) = spec_from_config(config.to_dict()).ropes
    cos, sin = tables(rope, HEAD_DIM, POSITIONS, "cpu")
    assert cos.shape == sin.shape == (POSITIONS, HEAD_DIM) and cos.dtype == sin.dtype == torch.float32
    # At a position of some thousands, one rounding of a frequency is some thousand roundings of the angle.
    torch.testing.assert_close(cos, true_cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(sin, true_sin[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(cos[:64], true_cos[0, :64], atol=1e-5, rtol=0)


def test_rope_rows_are_positions() -> None:
    cos, sin = tables(RopeSpec("default", 100.0), 4, 3, "cpu")
    angles = torch.tensor([2.0, 0.2, 2.0, 0.2])  # position 2; frequencies 1 and 100^(-1/2)
    torch.testing.assert_close(cos[2], angles.cos())
    torch.testing.assert_close(sin[2], angles.sin())
    assert cos[0].tolist() == [1.0] * 4 and sin[0].tolist() == [0.0] * 4


def test_queries_grow_with_each_multiple_of_the_original_positions() -> None:
    scales = query_scales(QueryScaling(0.1, 4), 10, "cpu")
    assert scales is not None and scales[:4].tolist() == [1.0] * 4
    torch.testing.assert_close(scales[[4, 7, 8, 9]], 1 + 0.1 * torch.tensor([2.0, 2.0, 3.0, 3.0]).log())
    assert query_scales(QueryScaling(0.1, 4), 4, "cpu") is None is query_scales(None, 10, "cpu")
