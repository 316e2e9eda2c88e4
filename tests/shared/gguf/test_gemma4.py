"""config.json of Gemma 4 states sizes that differ between layers; files with contradictory sizes are refused."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.gguf.config import config_of
from shared.gguf.config_values import FULL, SLIDING
from shared.gguf.container import Container, StoredTensor
from shared.gguf.naming import GgufError

FACTORS = [1.0, 1e30, 1e30, 1e30]


def container(folder: Path, change: dict[str, Any], factors: list[float] | None = None) -> Container:
    """Returns a file with four layers, of which the last two share K/V."""
    path = folder / "m.gguf"
    path.write_bytes(struct.pack(f"<{len(factors or FACTORS)}f", *(factors or FACTORS)))
    values = {
        "block_count": 4, "context_length": 512, "embedding_length": 16, "feed_forward_length": [8, 8, 16, 16],
        "attention.head_count": 4, "attention.head_count_kv": [2, 1, 2, 1], "attention.key_length": 8,
        "attention.value_length": 8, "attention.key_length_swa": 4, "attention.value_length_swa": 4,
        "attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False, True, False],
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 6, "final_logit_softcapping": 30.0,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 8, "rope.dimension_count_swa": 4,
    } | change  # fmt: skip
    metadata = {f"gemma4.{name}": value for name, value in values.items() if value is not None}
    metadata |= {"general.architecture": "gemma4", "tokenizer.ggml.tokens": ["a", "b", "c"]}
    factor = StoredTensor(path, "F32", (len(factors or FACTORS),), 0, 4 * len(factors or FACTORS))
    table = replace(factor, type="Q4_K", shape=(3, 16))
    tensors = {"token_embd.weight": table, "rope_freqs.weight": factor, "blk.1.attn_v.weight": table}
    return Container("m.gguf", metadata, tensors | {"per_layer_token_embd.weight": replace(table, shape=(5, 24))})


def test_sizes_of_layers(tmp_path: Path) -> None:
    config = config_of(container(tmp_path, {}))
    expected = {
        "model_type": "gemma4_text", "head_dim": 4, "num_key_value_heads": 2, "intermediate_size": 8,
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 32, "num_kv_shared_layers": 2,
        "per_layer_config": {
            "1": {"head_dim": 8, "num_key_value_heads": 1}, "3": {"head_dim": 8, "num_key_value_heads": 1},
        },
        "use_double_wide_mlp": True, "attention_k_eq_v": False, "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 5, "final_logit_softcapping": 30.0, "num_experts": None,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


def test_a_full_layer_without_values_has_those_of_its_keys(tmp_path: Path) -> None:
    whole = container(tmp_path, {})
    tensors = {name: tensor for name, tensor in whole.tensors.items() if "attn_v" not in name}
    assert config_of(replace(whole, tensors=tensors))["attention_k_eq_v"]


def test_experts(tmp_path: Path) -> None:
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 12}
    config = config_of(container(tmp_path, experts))
    assert config["enable_moe_block"] and config["num_experts"] == 8
    assert config["top_k_experts"] == 2 and config["moe_intermediate_size"] == 12


@pytest.mark.parametrize(
    ("change", "factors", "words"),
    [
        ({"feed_forward_length": [8, 16, 16, 16]}, None, r"feed_forward_length \[8, 16, 16, 16\] is not supported"),
        ({"feed_forward_length": [8, 8, 16]}, None, r"feed_forward_length must have a whole number for each layer"),
        ({"attention.head_count_kv": [2, 1, 1, 1]}, None, r"layers with a window have different numbers of key heads"),
        ({"attention.head_count_kv": [2, 0, 2, 1]}, None, r"head_count_kv must have a whole number for each layer"),
        ({"attention.sliding_window_pattern": [True]}, None, r"its pattern of windows has 1 entries for 4 layers"),
        ({"rope.dimension_count": 4}, None, r"gemma4.rope.dimension_count is 4; supported is 8"),
        ({"rope.scaling.type": "yarn"}, None, r"rotary scaling is not supported in Gemma 4"),
        ({"attention.value_length": 4}, None, r"gemma4.attention.value_length is 4; supported is 8"),
        ({"attention.key_length": None}, None, r"has no gemma4.attention.key_length"),
        ({"altup.num_inputs": 4}, None, r"gemma4.altup.num_inputs is 4; this value is not supported"),
        ({}, [1.0, 1e30, 1.0, 1e30], r"rope_freqs.weight has other factors than 1, and 1e\+30"),
        ({}, [1.0, 2.0, 2.0, 2.0], r"rope_freqs.weight has other factors than 1, and 1e\+30"),
        ({}, [1.0, 1e30], r"rope_freqs.weight is missing, or does not fit"),
    ],
)  # fmt: skip
def test_lies_are_named(change: dict[str, Any], factors: list[float] | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=f"^m.gguf.*{words}"):
        config_of(container(tmp_path, change, factors))
