"""Rows of an embedding, stored as plain numbers or in the blocks of a GGUF file: chooses which form runs.

An embedding is large and a step reads few of its rows. So on a CPU with the C library, an embedding that a file has in
a block format stays in its blocks, in the file's own bits, and each step unpacks the rows that it needs. A row has the
same bits as that row of the dequantized table: each number is computed by itself.

A head that is tied to such an embedding has the same codes, packed for products. Then the embedding reads the codes of
a row from the head, and keeps only the scales and minimums of its blocks, because those of a packed weight are rounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops import native as c_library
from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.embedding import native
from worker.ops.embedding.reference import rows_torch
from worker.ops.linear.native import CpuWeight

ROWS_AT_ONCE = 4096  # how many rows `equals` reads at once


@dataclass(frozen=True, slots=True)
class Embedding:
    """A table [N, H] whose rows are read by their index."""

    stored: Tensor  # [N, H] of `dtype`; or in blocks: the bytes of the rows, uint8 [N, bytes of a row]
    dtype: torch.dtype  # of the rows that are read
    blocks: BlockFormat | None = None  # the format of `stored`; None: plain numbers
    head: CpuWeight | None = None  # has the codes; then `stored` has only those bytes of each block that are its scales

    def rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the rows `ids` [T] int64, [T, H] of `dtype`. out: contiguous memory for them

        Raises IndexError if an id is not in [0, N) and the rows are on a CPU.
        """
        if self.blocks is None:
            return F.embedding(ids, self.stored) if out is None else torch.index_select(self.stored, 0, ids, out=out)
        if self.head is not None:
            return native.packed_rows(self.head, self.stored, self.blocks, ids, self.dtype, out)
        if self.blocks.is_unpacked_in_c and c_library.available(self.dtype):
            return native.rows(self.in_blocks, ids, self.dtype, out)
        rows = rows_torch(self.in_blocks, ids, self.dtype)
        return rows if out is None else out.copy_(rows)

    @property
    def in_blocks(self) -> BlockRows:
        assert self.blocks is not None and self.head is None
        return BlockRows(self.stored, self.blocks)

    def table(self) -> Tensor:
        """Returns all rows [N, H]: `stored` itself if its numbers are plain, else new memory."""
        if self.head is not None:
            return self.rows(torch.arange(len(self)))
        return self.stored if self.blocks is None else self.in_blocks.dequantize(self.dtype)

    def equals(self, table: Tensor) -> bool:
        """Returns whether a table [N, H] of the same dtype has the same numbers. Needs memory for few rows only."""
        return table.shape == self.shape and all(torch.equal(*pair) for pair in self._pairs(table))

    def _pairs(self, table: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.arange(len(self), device=self.device).split(ROWS_AT_ONCE):
            yield self.rows(part), table[part[0] : part[-1] + 1]

    @property
    def shape(self) -> tuple[int, int]:
        if self.head is not None:
            return self.head.n, self.head.k
        n, width = self.stored.shape if self.blocks is None else self.in_blocks.shape
        return n, width

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def device(self) -> torch.device:
        return self.stored.device

    @property
    def is_cuda(self) -> bool:
        return self.stored.is_cuda

    @property
    def nbytes(self) -> int:
        """How many bytes the embedding takes in memory, without a head that it reads."""
        return self.stored.nbytes

    @property
    def like(self) -> Tensor:
        """An empty tensor [0, H] with the device and dtype of the rows."""
        return torch.empty(0, self.shape[1], dtype=self.dtype, device=self.device)


def in_head(rows: BlockRows, head: CpuWeight, dtype: torch.dtype) -> Embedding:
    """Returns an embedding [N, H] that reads its codes from a head with the same rows.

    The format of the rows must have `scales`. The embedding does not keep the memory of the rows.
    """
    scales = rows.format.scales
    assert scales is not None and len(head.parts) == 1 and rows.shape == (head.n, head.k) and head.dtype == dtype
    stored = rows.stored.view(head.n, -1, rows.format.nbytes)[:, :, scales].contiguous()
    return Embedding(stored.flatten(1), dtype, rows.format, head)


def plain(table: Tensor) -> Embedding:
    """Returns an embedding of plain numbers [N, H]."""
    return Embedding(table, table.dtype)
