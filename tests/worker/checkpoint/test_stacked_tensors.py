"""A tensor of all experts of a layer is cut into a tensor for each expert; other tensors keep their names."""

import pytest

from worker.checkpoint.checkpoint import MOST, names_of_experts

LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("stored", "kind"),
    [("gate_up_proj", "weight"), ("gate_up_proj_bias", "bias"), ("down_proj_blocks", "weight_blocks"),
     ("down_proj_scales", "weight_scales"), ("gate_up_proj_scale_inv", "weight_scale_inv")],
)  # fmt: skip
def test_tensor_of_all_experts_is_cut(stored: str, kind: str) -> None:
    module = stored.removesuffix("_bias").removesuffix("_blocks").removesuffix("_scales").removesuffix("_scale_inv")
    names = names_of_experts(f"{LAYER}mlp.experts.{stored}", (3, 8, 4))
    assert names == [f"{LAYER}mlp.experts.{expert}.{module}.{kind}" for expert in range(3)]


@pytest.mark.parametrize("kind", ["scale", "input_scale", "activation_scale"])
def test_vector_with_a_number_for_each_expert_is_cut(kind: str) -> None:
    names = names_of_experts(f"{LAYER}mlp.experts.up_proj_{kind}", (3,))
    assert names == [f"{LAYER}mlp.experts.{expert}.up_proj.{kind}" for expert in range(3)]


def test_scale_of_a_whole_expert_is_cut_from_a_vector() -> None:
    names = names_of_experts(f"{LAYER}mlp.experts.down_proj_scale_inv", (2,))
    assert names == [f"{LAYER}mlp.experts.{expert}.down_proj.weight_scale_inv" for expert in range(2)]


def test_granites_linears_are_cut() -> None:
    module = LAYER + "block_sparse_moe.input_linear"
    assert names_of_experts(f"{module}.weight", (2, 8, 4)) == [f"{module}.0.weight", f"{module}.1.weight"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.0.up_proj.weight", (8, 4)), ("mlp.experts.gate_up_proj", (8,)), ("mlp.up_proj.weight", (8, 4)),
        ("mlp.experts.gate_up_proj", (0, 8)), ("mlp.experts.gate_up_proj", (MOST + 1, 8)),
        ("mlp.shared_experts.up_proj", (8, 4)), ("mlp.gate.weight", (8, 4)),
    ],
)  # fmt: skip
def test_other_tensor_is_kept(name: str, shape: tuple[int, ...]) -> None:
    assert names_of_experts(LAYER + name, shape) == []
