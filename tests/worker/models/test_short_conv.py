"""The sizes of LFM2's short convolutions, and the values that its configs may have."""

from typing import Any

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.ops.recurrent_state import ShortConvShape

LFM2_1B: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}  # fmt: skip


def test_lfm2_has_short_convolutions() -> None:
    spec = spec_from_config(LFM2_1B)
    assert spec.layers[0].state == ShortConvShape(2048, 3) and spec.tied and spec.qk_norm and spec.norm_eps == 1e-5
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
