"""Reading a vision tower's settings from a checkpoint's files: defaults, sizes of published models, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.models.config import spec_from_config
from worker.vision.families import vision_spec

SMOLVLM_256M: dict[str, Any] = {  # states only values that are not defaults of its config class
    "model_type": "smolvlm", "scale_factor": 4, "image_token_id": 49190,
    "vision_config": {"hidden_size": 768, "image_size": 512, "patch_size": 16, "num_attention_heads": 12},
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3", "mm_tokens_per_image": 256, "image_token_index": 262144,
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14,
    },
}  # fmt: skip
QWEN3_VL_4B: dict[str, Any] = {
    "model_type": "qwen3_vl", "text_config": {"rope_scaling": {"mrope_section": [24, 20, 20]}, "num_hidden_layers": 36},
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip

QWEN2_5_VL_7B: dict[str, Any] = {  # a flat config with the names of older releases
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_hidden_layers": 28, "image_token_id": 151655,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
    },
}  # fmt: skip


MISTRAL_SMALL_3_1: dict[str, Any] = {
    "model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1,
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 1540, "patch_size": 14,
        "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64, "hidden_act": "silu", "rope_theta": 10000.0,
    },
}  # fmt: skip
PIXTRAL_12B: dict[str, Any] = {
    "model_type": "llava", "image_token_index": 10, "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu",
    "vision_config": {**MISTRAL_SMALL_3_1["vision_config"], "image_size": 1024, "patch_size": 16},
}  # fmt: skip


GEMMA4_31B: dict[str, Any] = {
    "model_type": "gemma4", "image_token_id": 258880,
    "text_config": {"use_bidirectional_attention": "vision", "pad_token_id": 0},
    "vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    },
}  # fmt: skip
GEMMA4_12B: dict[str, Any] = {
    "model_type": "gemma4_unified", "text_config": {"use_bidirectional_attention": "vision"},
    "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 3840, "output_proj_dims": 3840},
}  # fmt: skip
LFM2_VL_450M: dict[str, Any] = {
    "model_type": "lfm2_vl", "image_token_id": 396, "projector_hidden_size": 2560, "downsample_factor": 2,
    "vision_config": {
        "model_type": "siglip2_vision_model", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
        "intermediate_size": 3072, "num_patches": 256, "patch_size": 16,
    },
}  # fmt: skip


def changed(config: dict[str, Any], **vision: Any) -> dict[str, Any]:
    return {**config, "vision_config": {**config["vision_config"], **vision}}


def test_sizes_of_published_models(tmp_path: Path) -> None:
    small = vision_spec(tmp_path, SMOLVLM_256M, 576)
    assert small is not None and small.tokens_of(512, 512) == 64 and not small.largest_whole
    assert (small.layers, small.intermediate_size, small.placeholder, small.mean) == (12, 3072, 49190, (0.5, 0.5, 0.5))
    gemma = vision_spec(tmp_path, GEMMA3_4B, 2560)
    assert gemma is not None and gemma.tokens_of(896, 896) == gemma.largest_whole == 256
    qwen = vision_spec(tmp_path, QWEN3_VL_4B, 2560)
    assert qwen is not None and qwen.tokens_of(448, 640) == 14 * 20 and qwen.deepstack == (5, 11, 17)
    assert (qwen.layers, qwen.sections, qwen.position_side, qwen.patch_width) == (24, (24, 20, 20), 48, 1536)
    mistral = vision_spec(tmp_path, MISTRAL_SMALL_3_1, 5120)
    assert mistral is not None and mistral.tokens_of(280, 560) == 10 * 21 - 1 and mistral.connector_eps == 1e-5
    pixtral = vision_spec(tmp_path, PIXTRAL_12B, 5120)
    assert pixtral is not None and pixtral.tokens_of(160, 32) == 10 * 3 - 1 and pixtral.connector_biased
    large = vision_spec(tmp_path, GEMMA4_31B, 5376)
    assert large is not None and large.tokens_of(768, 816) == 16 * 17 and large.largest_whole == 280
    assert "would be 289 tokens" in large.size_problem(816, 816) and not large.size_problem(768, 816)
    assert (large.position_axes, large.rotary_theta, large.standardized, large.clamped) == (10240, 100.0, True, False)
    unified = vision_spec(tmp_path, GEMMA4_12B, 3840)
    assert unified is not None and unified.tokens_of(768, 816) == 16 * 17 and unified.largest_whole == 280
    assert large.mean == unified.mean == (0.0, 0.0, 0.0) and large.std == unified.std == (1.0, 1.0, 1.0)
    liquid = vision_spec(tmp_path, LFM2_VL_450M, 1024)
    assert liquid is not None and liquid.tokens_of(512, 512) == 256 and liquid.tokens_of(416, 576) == 13 * 18
    assert (liquid.position_side, liquid.connector_size, liquid.joined_eps) == (16, 2560, 1e-5)
    older = vision_spec(tmp_path, QWEN2_5_VL_7B, 3584)
    assert older is not None and older.tokens_of(448, 644) == 16 * 23 and older.whole_layers == (7, 15, 23, 31)
    assert (older.window, older.sections, older.sections_alternate, older.gated) == (8, (16, 24, 24), False, True)


def test_settings_that_are_left_out_have_the_defaults_of_their_class(tmp_path: Path) -> None:
    vision = {name: value for name, value in MISTRAL_SMALL_3_1["vision_config"].items() if name != "hidden_act"}
    tower = vision_spec(tmp_path, {**MISTRAL_SMALL_3_1, "vision_config": vision}, 5120)
    stated = vision_spec(tmp_path, MISTRAL_SMALL_3_1, 5120)
    assert tower is not None and stated is not None and (tower.activation, stated.activation) == ("gelu", "silu")
    for text, sees in (({}, True), ({"use_bidirectional_attention": None}, False)):
        unified = vision_spec(tmp_path, {**GEMMA4_12B, "text_config": text}, 3840)
        assert unified is not None and unified.bidirectional is sees


@pytest.mark.parametrize("act", ["gelu", "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(
    "config", [SMOLVLM_256M, QWEN2_5_VL_7B, MISTRAL_SMALL_3_1, GEMMA4_31B], ids=lambda one: one["model_type"]
)
def test_towers_take_the_activations_of_their_classes(config: dict[str, Any], act: str, tmp_path: Path) -> None:
    name = "hidden_activation" if config is GEMMA4_31B else "hidden_act"
    found = vision_spec(tmp_path, changed(config, **{name: act}), 3584)
    assert found is not None and found.activation == act.replace("pytorch_", "")


def test_text_of_qwen2_5_vl_rotates_as_other_text_does() -> None:
    sizes = {"intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    spec = spec_from_config({**QWEN2_5_VL_7B, **sizes})
    assert spec.ropes[0].kind == "default" and spec.qkv_bias and (spec.hidden_size, len(spec.layers)) == (3584, 28)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_processor_says_how_pixels_are_normalized(file: str, tmp_path: Path) -> None:
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "rescale_factor": 0.5}
    nested = {"image_processor": settings} if file.startswith("processor") else settings
    (tmp_path / file).write_text(json.dumps(nested))
    spec = vision_spec(tmp_path, SMOLVLM_256M, 576)
    assert spec is not None and (spec.mean, spec.std, spec.rescale) == ((0.1, 0.2, 0.3), (1, 2, 3), 0.5)
    (tmp_path / file).write_text(json.dumps({**settings, "do_normalize": False, "do_rescale": False}))
    spec = vision_spec(tmp_path, SMOLVLM_256M, 576)
    assert spec is not None and (spec.mean, spec.std, spec.rescale) == ((0, 0, 0), (1, 1, 1), 1)


@pytest.mark.parametrize("config", [{"model_type": "pixtral", "vision_config": {}}, {"model_type": "smolvlm"}])
def test_families_and_checkpoints_without_a_served_tower(config: dict[str, Any], tmp_path: Path) -> None:
    assert vision_spec(tmp_path, config, 64) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(SMOLVLM_256M, num_hidden_layers=1025), "num_hidden_layers 1025"),
        (changed(SMOLVLM_256M, image_size=1 << 15), "image_size 32768"),
        (changed(SMOLVLM_256M, image_size=[512, 512]), "image_size"),
        (changed(SMOLVLM_256M, patch_size=0), "patch_size 0"),
        (changed(SMOLVLM_256M, patch_size=2), "more than 16384"),
        (changed(SMOLVLM_256M, hidden_act="relu"), "hidden_act 'relu'"),
        (changed(SMOLVLM_256M, num_channels=4), "num_channels 4"),
        (changed(SMOLVLM_256M, num_attention_heads=7), "not a multiple"),
        (changed(SMOLVLM_256M, num_attention_heads=1), "heads of 768"),
        (changed(SMOLVLM_256M, layer_norm_eps="small"), "wrong type"),
        ({**SMOLVLM_256M, "scale_factor": 5}, "no whole number of tokens"),
        ({**SMOLVLM_256M, "scale_factor": 65}, "scale_factor 65"),
        ({**SMOLVLM_256M, "image_token_id": -1}, "image_token_id -1"),
        ({**GEMMA3_4B, "mm_tokens_per_image": 1 << 14}, "no whole number of tokens"),
        (changed(QWEN3_VL_4B, out_hidden_size=64), "out_hidden_size 64 is not 2560"),
        (changed(QWEN3_VL_4B, num_position_embeddings=2300), "not a square"),
        (changed(QWEN3_VL_4B, temporal_patch_size=17), "temporal_patch_size 17"),
        (changed(QWEN3_VL_4B, deepstack_visual_indexes=[5, 24]), "deepstack_visual_indexes"),
        (changed(QWEN3_VL_4B, deepstack_visual_indexes=[7, 5]), "deepstack_visual_indexes"),
        (changed(QWEN3_VL_4B, deepstack_visual_indexes=5), "wrong type"),
        ({**changed(QWEN2_5_VL_7B, out_hidden_size=2560, window_size=27)}, "window_size 27"),
        ({**changed(QWEN2_5_VL_7B, out_hidden_size=2560, window_size=1 << 15)}, "window_size 32768"),
        ({**changed(QWEN2_5_VL_7B, out_hidden_size=2560, fullatt_block_indexes=["7"])}, "fullatt_block_indexes"),
        ({**changed(QWEN2_5_VL_7B, out_hidden_size=2560, hidden_act="relu")}, "hidden_act 'relu'"),
        (
            changed(MISTRAL_SMALL_3_1, hidden_act="quick_gelu"),
            "hidden_act 'quick_gelu' is not supported; supported are",
        ),
        (changed(MISTRAL_SMALL_3_1, head_dim=128), "head_dim 128"),
        ({**MISTRAL_SMALL_3_1, "vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({**MISTRAL_SMALL_3_1, "projector_hidden_act": "relu"}, "projector_hidden_act 'relu'"),
        ({**MISTRAL_SMALL_3_1, "spatial_merge_size": 65}, "spatial_merge_size 65"),
        (changed(PIXTRAL_12B, model_type="clip_vision_model"), "'clip_vision_model' is not supported"),
        ({**PIXTRAL_12B, "vision_feature_select_strategy": "default"}, "select_strategy 'default'"),
        (changed(GEMMA4_31B, num_key_value_heads=4), "num_key_value_heads 4"),
        (changed(GEMMA4_31B, head_dim=64), "head_dim 64"),
        (changed(GEMMA4_31B, hidden_activation="relu"), "hidden_act 'relu'"),
        (changed(GEMMA4_31B, position_embedding_size=0), "position_embedding_size 0"),
        (changed(GEMMA4_31B, pooling_kernel_size=65), "pooling_kernel_size 65"),
        (changed(GEMMA4_31B, rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn'"),
        (changed(GEMMA4_12B, patch_size=0), "patch_size 0"),
        (changed(GEMMA4_12B, output_proj_dims=64), "output_proj_dims 64"),
        (changed(LFM2_VL_450M, num_patches=200), "num_patches 200"),
        (changed(LFM2_VL_450M, model_type="siglip_vision_model"), "'siglip_vision_model' is not supported"),
        ({**LFM2_VL_450M, "vision_feature_layer": -2}, "vision_feature_layer -2"),
        ({**LFM2_VL_450M, "projector_hidden_act": "relu"}, "projector_hidden_act 'relu'"),
        ({**LFM2_VL_450M, "projector_hidden_size": 0}, "projector_hidden_size 0"),
        ({**LFM2_VL_450M, "downsample_factor": 65}, "downsample_factor 65"),
        ({**QWEN3_VL_4B, "text_config": {"num_hidden_layers": 3}}, "as many as the text model has layers"),
        ({**QWEN3_VL_4B, "text_config": {"rope_scaling": {"mrope_section": [24, 20]}}}, "mrope_section"),
        ({**QWEN3_VL_4B, "text_config": {"rope_scaling": {"mrope_section": 24}}}, "wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tower_that_cannot_be_served_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        vision_spec(tmp_path, config, 2560)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"), ("[1]", "not a JSON object"), ('{"image_mean": [1, 2]}', "image_mean"),
        ('{"image_std": [1, 0, 1]}', "image_std"), ('{"rescale_factor": {}}', "wrong type"),
        ('{"image_mean": ["a", "b", "c"]}', "wrong type"),
    ],
)  # fmt: skip
def test_processor_that_cannot_be_read_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=words):
        vision_spec(tmp_path, SMOLVLM_256M, 576)
