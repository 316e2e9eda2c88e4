"""The inputs of a decode that is recorded once and replayed: columns at fixed places of one block of memory.

The host fills a block and sends it in one copy; the device reads the same columns from its own. Knows sequences and
tensors; no graphs. What a step has fewer rows than the block is padding: it computes token 0 in the scratch page.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.params import PlainParams
from worker.run.inputs import UNKNOWN, pending_tokens
from worker.run.sampler import signed
from worker.schedule.sequence import Chunk, Sequence

ALIGN = 128  # bytes, of a column's first: kernels are compiled for what an address is a multiple of
KNOWN = -1  # as a source: the token is in `token_ids`


@dataclass(frozen=True, slots=True)
class Columns:
    """Of B rows with room for P pages each."""

    token_ids: Tensor  # [B] int64
    sources: Tensor  # [B] int64: which of the last step's ids the token is, or KNOWN
    positions: Tensor  # [B] int64
    slot_mapping: Tensor  # [B] int64
    seq_lens: Tensor  # [B] int32
    page_table: Tensor  # [B, P] int32
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    output_positions: Tensor  # [B] int64: how many output tokens there are so far

    @classmethod
    def of(cls, block: Tensor, batch: int, pages: int) -> "Columns":
        """Views of a block of `block_bytes(batch, pages)` uint8."""
        views, begin = {}, 0
        for name, (dtype, shape) in _columns(batch, pages).items():
            size = _bytes(dtype, shape)
            views[name] = block[begin : begin + size].view(dtype).view(shape)
            begin += _aligned(size)
        return cls(**views)

    @property
    def sampling(self) -> PlainParams:
        return PlainParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.output_positions)


def block_bytes(batch: int, pages: int) -> int:
    return sum(_aligned(_bytes(dtype, shape)) for dtype, shape in _columns(batch, pages).values())


def _columns(batch: int, pages: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    longs = ("token_ids", "sources", "positions", "slot_mapping", "top_k", "seeds", "output_positions")
    return {
        **dict.fromkeys(longs, (torch.int64, (batch,))),
        **dict.fromkeys(("temperature", "top_p", "min_p"), (torch.float32, (batch,))),
        "seq_lens": (torch.int32, (batch,)),
        "page_table": (torch.int32, (batch, pages)),
    }


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class HostBlock:
    """One block on the host. A row is written anew when another sequence has it; else only what moves."""

    def __init__(self, batch: int, pages: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._block = torch.zeros(block_bytes(batch, pages), dtype=torch.uint8, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        views = Columns.of(self._block, batch, pages)
        self._at: dict[str, NDArray[Any]] = {item.name: getattr(views, item.name).numpy() for item in fields(Columns)}
        self._prompts = np.zeros(batch, np.int64)  # their lengths
        self._held: list[array[int] | None] = [None] * batch  # whose pages a row of the table has
        self._used = [0] * batch  # how many of them
        self._rows = batch
        self._pad(0)

    def fill(self, chunks: Seq[Chunk], before: Seq[Chunk], page_size: int) -> None:
        """Decodes of one token each; `before` are the chunks of the step before, for tokens not known yet."""
        if self._sent is not None:
            self._sent.synchronize()  # nobody reads it any more
        n, at = len(chunks), self._at
        begins = [chunk.start for chunk in chunks]
        starts = np.array(begins, np.int64)
        for row, (chunk, last) in enumerate(zip(chunks, (starts // page_size).tolist(), strict=True)):
            if self._held[row] is not chunk.sequence.pages:
                self._take(row, chunk.sequence)
            if self._used[row] <= last:
                self._list_pages(row, chunk.sequence.pages, last + 1)
        self._pad(n)
        known = [(chunk.sequence.tokens, start) for chunk, start in zip(chunks, begins, strict=True)]
        at["token_ids"][:n] = [tokens[start] if start < len(tokens) else UNKNOWN for tokens, start in known]
        at["sources"][:n] = KNOWN
        rows, sources = pending_tokens(chunks, before)
        at["sources"][rows] = sources
        at["positions"][:n] = starts
        at["seq_lens"][:n] = starts + 1
        at["output_positions"][:n] = starts + 1 - self._prompts[:n]
        at["slot_mapping"][:n] = at["page_table"][np.arange(n), starts // page_size].astype(np.int64) * page_size
        at["slot_mapping"][:n] += starts % page_size

    def send(self, block: Tensor) -> None:
        """To the device's block, in its stream's order."""
        block.copy_(self._block, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _take(self, row: int, sequence: Sequence) -> None:
        at, sampling = self._at, sequence.sampling
        at["page_table"][row, : self._used[row]] = 0
        self._held[row], self._used[row], self._prompts[row] = sequence.pages, 0, sequence.prompt_len
        at["temperature"][row], at["top_k"][row] = sampling.temperature, sampling.top_k
        at["top_p"][row], at["min_p"][row] = sampling.top_p, sampling.min_p
        at["seeds"][row] = signed(sequence.seed)

    def _list_pages(self, row: int, pages: "array[int]", used: int) -> None:
        begin = self._used[row]
        self._at["page_table"][row, begin:used] = np.frombuffer(pages, np.int32, used - begin, begin * pages.itemsize)
        self._used[row] = used

    def _pad(self, rows: int) -> None:
        """From `rows` on it is padding: token 0 at position 0 of the scratch page, alone and greedy."""
        gone = slice(rows, self._rows)
        if rows < self._rows:
            for column in self._at.values():
                column[gone] = 0
            self._at["sources"][gone], self._at["seq_lens"][gone], self._at["top_p"][gone] = KNOWN, 1, 1.0
            self._held[gone] = [None] * (self._rows - rows)
            self._used[gone] = [0] * (self._rows - rows)
        self._rows = rows
