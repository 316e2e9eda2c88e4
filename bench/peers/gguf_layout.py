"""Changes tensors as llama.cpp's converter does. Arrays hold unquantized values, or each row's quantized blocks as
bytes.

paired rows     interleaves the two halves of each query and key head, where llama.cpp rotates neighbouring rows
tiled heads     value heads of recurrent layers: first the first value head of every key head, then every second, ...
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Config = Mapping[str, Any]
Array = npt.NDArray[Any]

PAIRED_MODELS = (
    "llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "granitemoe", "granitemoeshared",
    "granitemoehybrid", "arcee",
)  # fmt: skip
SHIFTED_MODELS = (  # models whose norms multiply by 1 + weight
    "gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron",
)  # fmt: skip
TILED_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")
# tensors whose last rows belong to values; any rows before belong to queries and keys
ROWS_OF_VALUES = ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")
ROWS_OF_VALUE_HEADS = ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")


def stored_rows(name: str, rows: Array, config: Config) -> Array:
    """Returns the rows of a tensor in the order of the GGUF file. name: the tensor's Hugging Face name."""
    if heads := _heads_to_pair(name, config):
        parts = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(rows.shape))
    if config["model_type"] not in TILED_MODELS or ".linear_attn." not in name:
        return rows
    if name.endswith(ROWS_OF_VALUE_HEADS):
        return np.ascontiguousarray(rows[_tiled(config, 1)])
    if not name.endswith(ROWS_OF_VALUES):
        return rows
    order = _tiled(config, config["linear_value_head_dim"])
    first = len(rows) - len(order)
    return np.concatenate((rows[:first], rows[first:][order]))


def stored_columns(name: str, numbers: Array, config: Config) -> Array:
    """Returns the columns of a weight in the order of the GGUF file."""
    order = _column_order(name, config)
    return numbers if order is None else np.ascontiguousarray(numbers[:, order])


def original_columns(name: str, numbers: Array, config: Config) -> Array:
    """Undoes stored_columns: returns the columns in Hugging Face order."""
    order = _column_order(name, config)
    return numbers if order is None else np.ascontiguousarray(numbers[:, np.argsort(order)])


def stored_numbers(name: str, numbers: Array, config: Config) -> Array:
    """Converts a tensor to GGUF: A_log becomes -exp(A_log), some norms get 1 added, kernels lose a dimension of 1."""
    if name.endswith(".A_log"):
        numbers = -np.exp(numbers)
    if config["model_type"] in SHIFTED_MODELS and name.endswith("norm.weight") and ".linear_attn." not in name:
        numbers = numbers + np.float32(1)
    if name.endswith(".moe_statics.e_score_correction_bias"):
        return numbers.reshape(-1)
    if name.endswith((".mamba.A_log", ".mamba.D")):
        return numbers[:, None]
    if name.endswith(".mamba.norm.weight"):
        return numbers.reshape(config["mamba_n_groups"], -1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        numbers = numbers[:, 0]
    return stored_rows(name, stored_columns(name, numbers, config), config)


def _heads_to_pair(name: str, config: Config) -> int:
    if config["model_type"] not in PAIRED_MODELS or "_norm" in name:
        return 0
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _column_order(name: str, config: Config) -> npt.NDArray[np.int64] | None:
    if config["model_type"] not in TILED_MODELS or not name.endswith(".linear_attn.out_proj.weight"):
        return None
    return _tiled(config, config["linear_value_head_dim"])


def _tiled(config: Config, size: int) -> npt.NDArray[np.int64]:
    """Returns, for each row of the GGUF file, its index in the Hugging Face weight. size: rows per value head."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(value_heads * size).reshape(key_heads, -1, size).swapaxes(0, 1).ravel()
