"""Undoes what llama.cpp's converter has changed in a tensor besides its name.

paired rows     In query and key heads, the rows of a rotated pair became neighbours: llama.cpp rotates neighbours.
tiled heads     The value heads of recurrent layers were reordered, and thus all rows and columns of value heads.
shifted norms   1 was added to the weights of norms that multiply by 1 + weight.
decays          A_log became -exp(A_log).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.gguf.index import Index, TiledHeads
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.gguf.tower_names import PREFIXES, SOFT_NORM

PAIRED_ARCHITECTURES = ("llama", "smollm3", "granite", "granitemoe", "mistral3", "arcee", "granitehybrid")
PAIRED = re.compile(r".*\.self_attn\.(q|k|qkv)_proj\.(weight|bias)")
PAIRED_TOWERS = ("pixtral",)
PAIRED_OF_TOWER = re.compile(r".*\.attention\.[qk]_proj\.weight")
SHIFTED_ARCHITECTURES = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "nemotron")
SHIFTED = re.compile(r".*(?<!\.linear_attn\.)norm\.weight")
DECAYS = re.compile(r".*\.(linear_attn|mamba)\.A_log")
# The weights of value heads. Value heads are their rows (maybe behind rows of queries and keys), or a value head is one
# row, or value heads are their columns.
OF_VALUES = re.compile(r".*\.linear_attn\.(in_proj_qkv|in_proj_z|conv1d)\.weight")
OF_VALUE_HEADS = re.compile(r".*\.linear_attn\.(A_log|dt_bias|in_proj_[ab]\.weight)")
BY_VALUES = re.compile(r".*\.linear_attn\.out_proj\.weight")
# Tensors that have a dimension of size 1 only in Hugging Face checkpoints: a weight of one row; convolution kernels.
ONE_ROW = re.compile(r".*\.mlp\.shared_expert_gate\.weight")
ONE_INPUT = re.compile(r".*\.(linear_attn\.conv1d|mamba\.conv1d|conv\.conv)\.weight")
# Vectors that GGUF files store as matrices, with a row for each number or for each group.
FLAT = re.compile(r".*\.mamba\.(A_log|D|norm\.weight)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor in a file differs from the tensor in a Hugging Face checkpoint.

    rows, columns: for each row or column in Hugging Face's order its index in the file; None: the order is the same
    undo: computes Hugging Face's numbers from float32 numbers of the file; None: the numbers are the same
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    undo: Callable[[Tensor], Tensor] | None = None

    def undone(self, stored: Tensor) -> Tensor:
        """Returns the tensor as in a Hugging Face checkpoint.

        stored: the tensor of the file; if its rows are bytes of a block format, its columns are not reordered here
        """
        numbers = stored if self.undo is None else self.undo(stored)
        numbers = numbers if self.rows is None else numbers[self.rows.to(stored.device)]
        if self.columns is None or stored.dtype == torch.uint8:
            return numbers
        return numbers[:, self.columns.to(stored.device)]


AS_STORED = Layout()


def layout_of(name: str, rows: int, index: Index) -> Layout:
    """Returns the layout of a tensor by its Hugging Face name. rows: the size of the tensor's first dimension."""
    # in a vision tower, the converter changes only one norm and the order of rotated rows
    if name.startswith(PREFIXES):
        if index.projector in PAIRED_TOWERS and PAIRED_OF_TOWER.fullmatch(name):
            pairs = torch.arange(rows).view(index.tower_heads, -1, 2)
            return Layout(rows=pairs.transpose(1, 2).flatten())
        return Layout(undo=lambda stored: stored - 1) if name == SOFT_NORM else AS_STORED
    if index.architecture in SHIFTED_ARCHITECTURES and SHIFTED.fullmatch(name):
        return Layout(undo=lambda stored: stored - 1)
    if index.architecture in PAIRED_ARCHITECTURES and PAIRED.fullmatch(name):
        values = index.kv_heads * index.head_dim if ".qkv_proj." in name else 0
        pairs = torch.arange(rows - values).view(-1, index.head_dim // 2, 2)
        return Layout(rows=torch.cat((pairs.transpose(1, 2).flatten(), torch.arange(rows - values, rows))))
    undo = (lambda stored: _log_of_decay(stored, name)) if DECAYS.fullmatch(name) else None
    heads = index.tiled_heads
    if heads is not None and OF_VALUES.fullmatch(name):
        return Layout(rows=_behind_others(_by_key_head(heads, heads.value_dim), rows))
    if heads is not None and OF_VALUE_HEADS.fullmatch(name):
        return Layout(rows=_by_key_head(heads, 1), undo=undo)
    columns = column_order(name, heads)
    return AS_STORED if undo is None and columns is None else Layout(columns=columns, undo=undo)


def column_order(name: str, heads: TiledHeads | None) -> Tensor | None:
    """Returns the index in the file of each column in Hugging Face's order; None if the order is the same."""
    return None if heads is None or not BY_VALUES.fullmatch(name) else _by_key_head(heads, heads.value_dim)


def _by_key_head(heads: TiledHeads, size: int) -> Tensor:
    stored = torch.arange(heads.key_heads * heads.per_key * size).view(heads.per_key, heads.key_heads, size)
    return stored.transpose(0, 1).flatten()


def _behind_others(order: Tensor, rows: int) -> Tensor:
    first = rows - len(order)
    return torch.cat((torch.arange(first), first + order))


def _log_of_decay(stored: Tensor, name: str) -> Tensor:
    if not (stored < 0).all():
        raise CheckpointError(f"tensor {name} is stored as {float(stored.max())}; supported are numbers below 0")
    return (-stored).log()


def hugging_face_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a tensor in a Hugging Face checkpoint. shape: its shape in the GGUF file"""
    if FLAT.fullmatch(name):
        return (math.prod(shape),)
    if ONE_ROW.fullmatch(name) and len(shape) == 1:
        return 1, *shape
    return (shape[0], 1, shape[1]) if ONE_INPUT.fullmatch(name) and len(shape) == 2 else shape
