"""Differences between the layers of Gemma 4, read from configs in the spellings of Google and of transformers."""

from typing import Any

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.spec import ModelSpec, PerLayerInputsSpec

SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN: dict[str, Any] = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
E2B: dict[str, Any] = {
    **PLAIN, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 20,
    "layer_types": [FULL if i % 5 == 4 else SLIDING for i in range(35)], "use_double_wide_mlp": True,
    "sliding_window": 512, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0,
}  # fmt: skip
DENSE: dict[str, Any] = {
    **PLAIN, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
    "attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
MOE: dict[str, Any] = {
    **DENSE, "num_hidden_layers": 30, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}  # fmt: skip


def shapes(spec: ModelSpec) -> set[tuple[bool, int, int]]:
    return {(layer.window > 0, *spec.kv_shape(layer)) for layer in spec.layers}


def test_e2b_shares_the_kv_of_the_last_layers_with_their_own() -> None:
    spec = spec_from_config(E2B)
    assert shapes(spec) == {(True, 1, 256), (False, 1, 512)} and spec.logit_softcap == 30.0
    assert [layer.shares for layer in spec.layers] == [None] * 15 + [14 if i % 5 == 4 else 13 for i in range(15, 35)]
    assert [layer.intermediate_size for layer in spec.layers] == [0] * 15 + [12288] * 20
    assert spec.last_kept == 14 and spec_from_config(DENSE).last_kept == 59
    assert spec.per_layer_inputs == PerLayerInputsSpec(262_144, 256) and spec.attention_scale == 1.0
    full = spec.ropes[spec.layers[4].rope]
    assert (full.kind, full.pairs, full.head_dim, full.theta) == ("proportional", 64, 512, 1e6)


def test_dense_models_take_values_from_keys_where_attention_is_full() -> None:
    spec = spec_from_config(DENSE)
    assert shapes(spec) == {(True, 16, 256), (False, 4, 512)} and spec.per_layer_inputs is None and spec.experts is None
    assert all(layer.key_is_value == (layer.window == 0) for layer in spec.layers)
    assert not any(layer.key_is_value for layer in spec_from_config({**DENSE, "attention_k_eq_v": False}).layers)


def test_key_heads_of_full_attention_count_only_where_values_are_keys() -> None:
    assert shapes(spec_from_config({**DENSE, "attention_k_eq_v": False})) == {(True, 16, 256), (False, 16, 512)}


def test_heads_of_each_layer_may_be_stated_one_by_one() -> None:
    full = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    stated = {name: value for name, value in DENSE.items() if "global" not in name}
    assert spec_from_config({**stated, "per_layer_config": full}) == spec_from_config(DENSE)


def test_experts_are_beside_the_mlp() -> None:
    experts = spec_from_config(MOE).experts
    assert experts is not None and (experts.count, experts.chosen, experts.beside_mlp) == (128, 8, True)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_multimodal_checkpoints_serve_their_text_model(name: str) -> None:
    text = {**DENSE, "model_type": f"{name}_text"}
    outer = {"model_type": name, "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    assert spec_from_config(outer).layers == spec_from_config(DENSE).layers


def test_config_without_rotary_settings_has_those_of_the_family() -> None:
    assert spec_from_config({**DENSE, "rope_parameters": None}).ropes == spec_from_config(DENSE).ropes


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (E2B, {"num_kv_shared_layers": 35}, ["num_kv_shared_layers 35"]),
        (E2B, {"num_kv_shared_layers": 32}, ["num_kv_shared_layers 32"]),
        (E2B, {"vocab_size_per_layer_input": 1000}, ["vocab_size_per_layer_input 1000"]),
        (E2B, {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "'all'"]),
        (E2B, {"layer_types": [SLIDING] * 35}, ["layer_types", "'sliding_attention'"]),
        (E2B, {"per_layer_config": {"30": {"head_dim": 128}}}, ["per_layer_config", "layer 30"]),
        (DENSE, {"per_layer_config": {"3": {"sliding_window": 9}}}, ["per_layer_config 3", "sliding_window"]),
        (DENSE, {"per_layer_config": {"60": {"head_dim": 128}}}, ["per_layer_config 60"]),
        (MOE, {"moe_intermediate_size": None}, ["moe_intermediate_size None"]),
        (MOE, {"top_k_experts": 200}, ["200 of 128 experts", "top_k_experts"]),
    ],
)
def test_impossible_layers_are_named(config: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config({**config, **change})
    assert all(word in str(caught.value) for word in words), caught.value
