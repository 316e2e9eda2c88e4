"""Loading undoes the converter's changes to tensors: rows, columns and numbers are Hugging Face's again."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bench.peers.gguf_file import ARCHITECTURES
from bench.peers.gguf_layout import original_columns, stored_columns, stored_numbers
from shared.gguf.index import Index, TiledHeads
from worker.checkpoint.checkpoint import CheckpointError
from worker.quantization.gguf_tensors import AS_STORED, column_order, hugging_face_shape, layout_of

LAYER = "model.layers.0."
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_value_head_dim": 3}


@dataclass(frozen=True)
class Model:
    """A model with heads of size 8, and two key heads in recurrent layers. per_key: value heads for each key head"""

    model_type: str
    per_key: int = 3

    @property
    def config(self) -> dict[str, Any]:
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * self.per_key}
        return SIZES | heads | {"model_type": self.model_type}

    @property
    def index(self) -> Index:
        architecture = ARCHITECTURES.get(self.model_type, self.model_type)
        tiled = TiledHeads(2, self.per_key, 3) if architecture.startswith("qwen35") else None
        return Index(architecture, 8, 2, (), {}, tiled)


@pytest.mark.parametrize(
    ("model_type", "name", "shape"),
    [
        ("llama", "self_attn.q_proj.weight", (32, 5)),
        ("smollm3", "self_attn.k_proj.bias", (16,)),
        ("granite", "self_attn.q_proj.weight", (32, 5)),
        ("granitemoe", "self_attn.k_proj.weight", (16, 5)),
        ("arcee", "self_attn.k_proj.weight", (16, 5)),
        ("nemotron", "input_layernorm.weight", (7,)),
        ("lfm2", "conv.conv.weight", (7, 1, 3)),
        ("granitemoehybrid", "mamba.conv1d.weight", (7, 1, 3)),
        ("granitemoehybrid", "mamba.A_log", (6,)),
        ("granitemoehybrid", "mamba.D", (6,)),
        ("ministral3", "self_attn.k_proj.weight", (16, 5)),
        ("gemma2", "post_feedforward_layernorm.weight", (7,)),
        ("gemma3_text", "self_attn.q_norm.weight", (8,)),
        ("qwen3_next", "self_attn.k_norm.weight", (8,)),
        ("qwen3_next", "linear_attn.A_log", (6,)),
        ("qwen3_5_text", "input_layernorm.weight", (7,)),
        ("qwen3_5_text", "linear_attn.A_log", (6,)),
        ("qwen3_5_text", "linear_attn.dt_bias", (6,)),
        ("qwen3_5_text", "linear_attn.in_proj_qkv.weight", (4 + 18, 5)),
        ("qwen3_5_text", "linear_attn.in_proj_z.weight", (18, 5)),
        ("qwen3_5_text", "linear_attn.in_proj_b.weight", (6, 5)),
        ("qwen3_5_moe_text", "linear_attn.in_proj_a.weight", (6, 5)),
        ("qwen3_5_moe_text", "linear_attn.out_proj.weight", (5, 18)),
        ("qwen3_5_moe_text", "linear_attn.conv1d.weight", (22, 1, 4)),
    ],
)
def test_what_the_converter_has_changed_is_undone(model_type: str, name: str, shape: tuple[int, ...]) -> None:
    model, original = Model(model_type), np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = stored_numbers(LAYER + name, original, model.config)
    assert stored.shape != shape or not np.array_equal(stored, original)
    found = torch.from_numpy(np.ascontiguousarray(stored))
    found = found.view(hugging_face_shape(LAYER + name, tuple(found.shape)))
    undone = layout_of(LAYER + name, shape[0], model.index).undone(found)
    assert undone.shape == shape and torch.allclose(undone, torch.from_numpy(original), atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "self_attn.v_proj.weight"),
        ("llama", "self_attn.q_norm.weight"),
        ("llama", "input_layernorm.weight"),
        ("qwen3", "self_attn.q_proj.weight"),
        ("glm4", "self_attn.q_proj.weight"),
        ("ernie4_5", "self_attn.k_proj.weight"),
        ("gemma2", "self_attn.q_proj.weight"),
        ("qwen3_next", "linear_attn.norm.weight"),
        ("qwen3_next", "linear_attn.in_proj_ba.weight"),
        ("qwen3_next", "linear_attn.out_proj.weight"),
        ("qwen3_5_text", "linear_attn.norm.weight"),
        ("qwen3_5_text", "self_attn.o_proj.weight"),
    ],
)
def test_other_tensors_are_as_stored(model_type: str, name: str) -> None:
    assert layout_of(LAYER + name, 18, Model(model_type).index) is AS_STORED


def test_queries_and_keys_in_one_tensor_are_undone_and_values_are_not() -> None:
    model, rows = Model("llama"), np.arange(64 * 3, dtype=np.float32).reshape(64, 3)
    parts = zip(("q_proj", "k_proj", "v_proj"), np.split(rows, (32, 48)), strict=True)
    stored = [stored_numbers(f"{LAYER}self_attn.{name}.weight", part, model.config) for name, part in parts]
    together = torch.from_numpy(np.concatenate(stored))
    undone = layout_of(f"{LAYER}self_attn.qkv_proj.weight", 64, model.index).undone(together)
    assert torch.equal(undone, torch.from_numpy(rows)) and not torch.equal(together, undone)


def test_columns_of_bytes_stay_as_they_are() -> None:
    name, model = f"{LAYER}linear_attn.out_proj.weight", Model("qwen3_5_text")
    layout, stored = layout_of(name, 5, model.index), torch.arange(90, dtype=torch.uint8).view(5, 18)
    assert torch.equal(layout.undone(stored), stored) and not torch.equal(layout.undone(stored.int()), stored.int())


def test_column_order_is_the_inverse_of_the_converters() -> None:
    name, model = f"{LAYER}linear_attn.out_proj.weight", Model("qwen3_5_text")
    order, numbers = column_order(name, model.index.tiled_heads), np.arange(36.0).reshape(2, 18)
    assert order is not None
    assert np.array_equal(stored_columns(name, numbers, model.config)[:, order.numpy()], numbers)
    assert np.array_equal(original_columns(name, stored_columns(name, numbers, model.config), model.config), numbers)


@pytest.mark.parametrize("value", [0.0, 0.5, float("nan")])
def test_decay_that_grows_is_refused(value: float) -> None:
    layout = layout_of(f"{LAYER}linear_attn.A_log", 2, Model("qwen3_next").index)
    with pytest.raises(CheckpointError, match=r"linear_attn.A_log is stored as .*; supported are numbers below 0"):
        layout.undone(torch.tensor([-1.0, value]))
