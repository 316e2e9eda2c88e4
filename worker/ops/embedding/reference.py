"""Rows of an embedding in a block format in PyTorch, which define them."""

import torch
from torch import Tensor

from worker.ops.block_rows import BlockRows


def rows_torch(table: BlockRows, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows `ids` [T] of a table [N, H], computed in float32 and rounded once to `dtype`, [T, H]."""
    return table.rows(ids).dequantize(dtype)
