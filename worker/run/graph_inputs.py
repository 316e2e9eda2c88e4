"""Holds the inputs of a captured decode as columns at fixed places in one block of memory.

The host fills a block and sends it in one copy. The device reads the same columns from its own block. Rows of the block
that a step does not need are padding: they compute token 0 in the scratch page. This module works on sequences and
tensors, and contains nothing about graphs.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.params import PlainParams
from worker.kernels.recurrent_state import NO_STATE
from worker.run.inputs import PLACEHOLDER, pending_tokens, state_slots
from worker.run.sampler import signed_seed
from worker.schedule.sequence import Chunk, Sequence

ALIGN = 128  # in bytes, for the start of each column: kernels are specialized for the alignment of addresses
BY_GROUP = ("slot_mappings", "page_tables")  # columns that each group of layers has
KNOWN = -1  # value of `sources`: the token is in `token_ids`


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The columns of B rows, with up to P pages per row and group of layers."""

    token_ids: Tensor  # [B] int64
    sources: Tensor  # [B] int64: index of the token in the ids of the last step, or KNOWN
    positions: Tensor  # [B] int64
    slot_mappings: tuple[Tensor, ...]  # of each group: [B] int64
    seq_lens: Tensor  # [B] int32
    read_slots: Tensor  # [B] int32: of recurrent states
    write_slots: Tensor  # [B] int32
    page_tables: tuple[Tensor, ...]  # of each group: [B, P] int32
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    output_positions: Tensor  # [B] int64: the number of output tokens so far

    @classmethod
    def of(cls, block: Tensor, batch: int, pages: int, groups: int) -> "GraphInputs":
        """Makes views of the columns in a block. block: [block_bytes(batch, pages, groups)] uint8."""
        views, begin = dict[str, list[Tensor]](), 0
        for name, dtype, shape in _layout(batch, pages, groups):
            size = _bytes(dtype, shape)
            views.setdefault(name, []).append(block[begin : begin + size].view(dtype).view(shape))
            begin += _aligned(size)
        columns: dict[str, Any] = {
            name: tuple(found) if name in BY_GROUP else found[0] for name, found in views.items()
        }
        return cls(**columns)

    @property
    def sampling(self) -> PlainParams:
        return PlainParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.output_positions)


def block_bytes(batch: int, pages: int, groups: int) -> int:
    return sum(_aligned(_bytes(dtype, shape)) for _, dtype, shape in _layout(batch, pages, groups))


def _layout(batch: int, pages: int, groups: int) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yields name, dtype and shape of the columns. The columns in BY_GROUP exist once per cache group."""
    longs = ("token_ids", "sources", "positions", "top_k", "seeds", "output_positions")
    yield from ((name, torch.int64, (batch,)) for name in (*longs, *["slot_mappings"] * groups))
    yield from ((name, torch.float32, (batch,)) for name in ("temperature", "top_p", "min_p"))
    yield from ((name, torch.int32, (batch,)) for name in ("seq_lens", "read_slots", "write_slots"))
    yield from (("page_tables", torch.int32, (batch, pages)) for _ in range(groups))


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class HostBlock:
    """A block on the host.

    A row is written in full if it gets another sequence. Otherwise only the values that change are written.
    """

    def __init__(self, batch: int, pages: int, groups: int, device: torch.device, *, recurrent: bool = False) -> None:
        on_gpu = device.type == "cuda"
        self._block = torch.zeros(block_bytes(batch, pages, groups), dtype=torch.uint8, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        views = GraphInputs.of(self._block, batch, pages, groups)
        self._columns: dict[str, NDArray[Any]] = {
            item.name: getattr(views, item.name).numpy() for item in fields(GraphInputs) if item.name not in BY_GROUP
        }
        self._slots = [slots.numpy() for slots in views.slot_mappings]
        self._page_tables = [table.numpy() for table in views.page_tables]
        self._prompt_lens = np.zeros(batch, np.int64)
        self._row_pages: list[list[array[int]] | None] = [None] * batch  # `pages` of the sequence in each row
        self._page_counts = [0] * batch  # how many of these pages are in its rows of page_tables
        self._recurrent = recurrent
        self._rows = batch
        self._pad(0)

    def fill(self, chunks: Seq[Chunk], before: Seq[Chunk], page_size: int) -> None:
        """Fills the columns for decodes of one token. before: chunks of the step that samples missing tokens."""
        if self._sent is not None:
            self._sent.synchronize()  # waits for the last copy, after which the block may be overwritten
        n, columns = len(chunks), self._columns
        begins = [chunk.start for chunk in chunks]
        starts = np.array(begins, np.int64)
        for row, (chunk, last) in enumerate(zip(chunks, (starts // page_size).tolist(), strict=True)):
            if self._row_pages[row] is not chunk.sequence.pages:
                self._replace_row(row, chunk.sequence)
            if self._page_counts[row] <= last:
                self._add_pages(row, chunk.sequence.pages, last + 1)
        self._pad(n)
        known = [(chunk.sequence.tokens, start) for chunk, start in zip(chunks, begins, strict=True)]
        columns["token_ids"][:n] = [tokens[start] if start < len(tokens) else PLACEHOLDER for tokens, start in known]
        columns["sources"][:n] = KNOWN
        rows, sources = pending_tokens(chunks, before)
        columns["sources"][rows] = sources
        columns["positions"][:n] = starts
        columns["seq_lens"][:n] = starts + 1
        columns["output_positions"][:n] = starts + 1 - self._prompt_lens[:n]
        if self._recurrent:
            columns["read_slots"][:n], columns["write_slots"][:n] = state_slots(chunks)
        rows_of, pages, offsets = np.arange(n), starts // page_size, starts % page_size
        for slots, table in zip(self._slots, self._page_tables, strict=True):
            slots[:n] = table[rows_of, pages].astype(np.int64) * page_size + offsets

    def send(self, block: Tensor) -> None:
        """Copies this block to the block of the device, in stream order."""
        block.copy_(self._block, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _replace_row(self, row: int, sequence: Sequence) -> None:
        columns, sampling = self._columns, sequence.sampling
        for table in self._page_tables:
            table[row, : self._page_counts[row]] = 0
        self._row_pages[row], self._page_counts[row] = sequence.pages, 0
        self._prompt_lens[row] = sequence.prompt_len
        columns["temperature"][row], columns["top_k"][row] = sampling.temperature, sampling.top_k
        columns["top_p"][row], columns["min_p"][row] = sampling.top_p, sampling.min_p
        columns["seeds"][row] = signed_seed(sequence.seed)

    def _add_pages(self, row: int, pages: "list[array[int]]", count: int) -> None:
        """Adds new pages. Pages that were returned since the row was written stay there, because no row reads them."""
        begin = self._page_counts[row]
        for table, own in zip(self._page_tables, pages, strict=True):
            table[row, begin:count] = np.frombuffer(own, np.int32, count - begin, begin * own.itemsize)
        self._page_counts[row] = count

    def _pad(self, rows: int) -> None:
        """Makes row `rows` and all later ones padding: token 0 at position 0 of the scratch page, sampled greedily.

        Their recurrent state goes to the scratch slot.
        """
        freed = slice(rows, self._rows)
        if rows < self._rows:
            columns = self._columns
            for column in (*columns.values(), *self._slots, *self._page_tables):
                column[freed] = 0
            columns["sources"][freed], columns["seq_lens"][freed], columns["top_p"][freed] = KNOWN, 1, 1.0
            columns["read_slots"][freed] = NO_STATE
            self._row_pages[freed] = [None] * (self._rows - rows)
            self._page_counts[freed] = [0] * (self._rows - rows)
        self._rows = rows
