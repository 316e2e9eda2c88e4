"""Holds the inputs of captured steps as columns at fixed places in one block of memory.

The host fills a block and sends it in one copy. The device reads the same columns from its own block, which steps of
all shapes share. Rows of a column that a step does not need are padding. In a decode step, these are further sequences
of one token. In a mixed step, they are the tokens of one further sequence, which is the last of its shape, and
sequences without tokens. Tokens of padding have id 0 and position 0, read and write the scratch page and the scratch
slot alone, and no real row reads what they write. So padding costs time and changes no bit of a real row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.recurrent_state import NO_STATE
from worker.kv_cache.pages import SCRATCH
from worker.run.graph_shapes import Shape
from worker.run.inputs import LogitsUse, StepColumns

ALIGN = 128  # in bytes, for the start of each column: kernels are specialized for the alignment of addresses
KNOWN = -1  # value of `sources`: the token is in `token_ids`
Pending = tuple[list[int], list[int]]  # rows whose tokens the host does not know, and their indices in the last ids


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The columns of a step of T tokens in S sequences, with R rows of logits; see ForwardInputs."""

    token_ids: Tensor  # [T] int64
    sources: Tensor  # [T] int64: index of the token in the ids of the last step, or KNOWN
    positions: Tensor  # [T] int64
    slot_mappings: tuple[Tensor, ...]  # of each group of layers: [T] int64
    logits_indices: Tensor  # [R] int64
    query_start_loc: Tensor  # [S+1] int32
    seq_lens: Tensor  # [S] int32
    lanes: Tensor  # [S] int32: rows of the page tables, see page_lanes.py
    read_slots: Tensor  # [S] int32: of recurrent states
    write_slots: Tensor  # [S] int32

    @classmethod
    def of(cls, block: Tensor, shape: Shape, groups: int) -> "GraphInputs":
        """Makes views of the columns in a block. block: [inputs_bytes(shape, groups) or more] uint8."""
        views = dict[str, list[Tensor]]()
        for name, view in views_of(block, _layout(shape, groups)):
            views.setdefault(name, []).append(view)
        columns: dict[str, Any] = {name: found[0] for name, found in views.items()}
        return cls(**columns | {"slot_mappings": tuple(views["slot_mappings"])})


Columns = Iterator[tuple[str, torch.dtype, int]]  # name, dtype and length of each column of a block


def views_of(block: Tensor, layout: Columns) -> Iterator[tuple[str, Tensor]]:
    """Yields the columns of a block [bytes] uint8 with their names. Each begins at a multiple of ALIGN."""
    begin = 0
    for name, dtype, length in layout:
        yield name, block[begin : begin + length * dtype.itemsize].view(dtype)
        begin += _aligned(length * dtype.itemsize)


def block_bytes(layout: Columns) -> int:
    return sum(_aligned(length * dtype.itemsize) for _, dtype, length in layout)


def inputs_bytes(shape: Shape, groups: int) -> int:
    return block_bytes(_layout(shape, groups))


def _layout(shape: Shape, groups: int) -> Columns:
    for name in ("token_ids", "sources", "positions", *["slot_mappings"] * groups):
        yield name, torch.int64, shape.tokens
    yield "logits_indices", torch.int64, shape.rows
    yield "query_start_loc", torch.int32, shape.sequences + 1
    for name in ("seq_lens", "lanes", "read_slots", "write_slots"):
        yield name, torch.int32, shape.sequences


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Blocks:
    """A block of memory on the device, and two on the host: one can be filled while the other is still being sent."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.on_host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._last = 0

    def next(self) -> int:
        """Returns which host block can be filled. If it is still being sent, waits for that."""
        self._last = 1 - self._last
        if self._sent:
            self._sent[self._last].synchronize()
        return self._last

    def send(self, nbytes: int) -> None:
        """Copies the first bytes of the block that next() returned to the device, in stream order."""
        self.on_device[:nbytes].copy_(self.on_host[self._last][:nbytes], non_blocking=True)
        if self._sent:
            self._sent[self._last].record()


class HostInputs:
    """The columns of one shape in a host block, as NumPy arrays."""

    def __init__(self, block: Tensor, shape: Shape, groups: int) -> None:
        self._shape = shape
        views = GraphInputs.of(block, shape, groups)
        self._slots = [slots.numpy() for slots in views.slot_mappings]
        self._token_ids, self._sources = views.token_ids.numpy(), views.sources.numpy()
        self._positions, self._logits_indices = views.positions.numpy(), views.logits_indices.numpy()
        self._query_start_loc, self._seq_lens = views.query_start_loc.numpy(), views.seq_lens.numpy()
        self._lanes, self._states = views.lanes.numpy(), [views.read_slots.numpy(), views.write_slots.numpy()]

    def fill(self, columns: StepColumns, pending: Pending, lanes: list[int], scratch: int, page_size: int) -> None:
        """Fills all columns. lanes: of the sequences; scratch: the lane of padding."""
        _put(self._token_ids, columns.token_ids, 0)
        self._sources[:] = KNOWN
        self._sources[pending[0]] = pending[1]
        _put(self._positions, columns.positions, 0)
        for slots, values in zip(self._slots, columns.slot_mappings, strict=True):
            _put(slots, values, SCRATCH * page_size + page_size - 1)
        _put(self._lanes, lanes, scratch)
        self._put_sequences(columns)
        if columns.read_slots is not None and columns.write_slots is not None:
            _put(self._states[0], columns.read_slots, NO_STATE)
            _put(self._states[1], columns.write_slots, SCRATCH)

    def fill_padding(self, groups: int, scratch: int, page_size: int, *, recurrent: bool) -> None:
        """Makes all rows padding."""
        none, of_none = np.zeros(0, np.int64), np.zeros(0, np.int32)
        states = (of_none, of_none) if recurrent else (None, None)
        start, use = np.zeros(1, np.int32), LogitsUse([], [])
        columns = StepColumns(none, none, [none] * groups, start, of_none, none, use, *states)
        self.fill(columns, ([], []), [], scratch, page_size)

    def _put_sequences(self, columns: StepColumns) -> None:
        sequences, tokens = len(columns.seq_lens), len(columns.token_ids)
        if self._shape.mixed:
            padding = self._shape.tokens - tokens
            _put(self._query_start_loc, columns.query_start_loc, tokens)
            self._query_start_loc[-1] = self._shape.tokens
            _put(self._seq_lens, columns.seq_lens, 0)
            self._seq_lens[-1] = padding
            _put(self._logits_indices, columns.logits_indices, self._shape.tokens - 1)
        else:
            self._query_start_loc[:] = np.arange(self._shape.sequences + 1)
            _put(self._seq_lens, columns.seq_lens, 1)
            self._logits_indices[:] = np.arange(self._shape.rows)
        assert sequences + self._shape.mixed <= self._shape.sequences


def _put(column: NDArray[Any], values: NDArray[Any] | list[int], padding: int) -> None:
    column[: len(values)] = values
    column[len(values) :] = padding
