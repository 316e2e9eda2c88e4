"""Holds the inputs of captured steps as columns at fixed places in one block of memory.

The host fills a block and sends it in one copy. The device reads the same columns from its own block, which steps of
all shapes share. Entries of a column that a step does not need are padding. In a decode step, padding consists of
additional sequences of one token. In a mixed step, it consists of one additional sequence, the last of the shape, with
all padding tokens, and of sequences without tokens. Padding tokens have id 0 and position 0. They read and write only
the scratch page and the scratch slot, which no real row reads, so padding costs time but does not change any real row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kv_cache.pages import SCRATCH
from worker.model.inputs.forward_inputs import COLUMNS
from worker.model.inputs.step_columns import Column, Extent, Padding
from worker.run.column_values import VALUES, StepLayout, rope_rows
from worker.run.graphs.graph_shapes import Shape

ALIGN = 128  # columns begin at multiples of this many bytes, because Triton compiles kernels for aligned pointers
KNOWN = -1  # value of `sources`: the token is in `token_ids`
Pending = tuple[list[int], list[int]]  # rows whose tokens the host does not know, and their indices in the last ids

# the columns of a block that ForwardInputs does not have
SOURCES = Column(torch.int64, Extent.TOKENS, KNOWN)  # index of the token in the ids of the last step, or KNOWN
LANES = Column(torch.int32, Extent.SEQUENCES, Padding.COMPUTED)  # rows of the page tables, see page_lanes.py
ROPE_ROWS = Column(torch.int64, Extent.TOKENS, 0)  # ForwardInputs.rope_rows, for models with M-RoPE


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Views of the columns of a step in a block, with the lengths of its shape. `columns`: for ForwardInputs."""

    columns: dict[str, list[Tensor]]  # name → one tensor, or one for each group of layers
    sources: Tensor
    lanes: Tensor
    rope_rows: Tensor

    @classmethod
    def of(cls, block: Tensor, shape: Shape, groups: int) -> "GraphInputs":
        """Makes views of the columns in a block. block: [inputs_bytes(shape, groups) or more] uint8."""
        columns: dict[str, list[Tensor]] = {}
        for name, view in views_of(block, _layout(shape, groups)):
            columns.setdefault(name, []).append(view)
        (sources,), (lanes,), (rope_rows,) = (columns.pop(name) for name in ("sources", "lanes", "rope_rows"))
        return cls(columns, sources, lanes, rope_rows)

    def forward_columns(self, *, recurrent: bool) -> dict[str, Any]:
        """Returns the columns as fields of ForwardInputs. recurrent: whether layers have a recurrent state."""
        return {
            name: tuple(self.columns[name]) if column.grouped else self.columns[name][0]
            for name, column in COLUMNS.items()
            if recurrent or not column.recurrent
        }


Columns = Iterator[tuple[str, torch.dtype, int]]  # name, dtype and length of each column of a block


def views_of(block: Tensor, layout: Columns) -> Iterator[tuple[str, Tensor]]:
    """Yields the columns of a block [bytes] uint8 with their names. Each column begins at a multiple of ALIGN."""
    begin = 0
    for name, dtype, length in layout:
        yield name, block[begin : begin + length * dtype.itemsize].view(dtype)
        begin += _aligned(length * dtype.itemsize)


def block_bytes(layout: Columns) -> int:
    return sum(_aligned(length * dtype.itemsize) for _, dtype, length in layout)


def inputs_bytes(shape: Shape, groups: int) -> int:
    return block_bytes(_layout(shape, groups))


def _layout(shape: Shape, groups: int) -> Columns:
    lengths = {
        Extent.TOKENS: shape.tokens,
        Extent.SEQUENCES: shape.sequences,
        Extent.BOUNDS: shape.sequences + 1,
        Extent.LOGITS: shape.rows,
    }
    for name, column in {**COLUMNS, "sources": SOURCES, "lanes": LANES, "rope_rows": ROPE_ROWS}.items():
        for _ in range(groups if column.grouped else 1):
            yield name, column.dtype, lengths[column.extent]


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
        """Returns the index of the host block to fill next. Waits until an earlier copy from it has finished."""
        self._last = 1 - self._last
        if self._sent:
            self._sent[self._last].synchronize()
        return self._last

    def send(self, nbytes: int) -> None:
        """Copies the first `nbytes` bytes of the host block that next() chose to the device, in stream order."""
        self.on_device[:nbytes].copy_(self.on_host[self._last][:nbytes], non_blocking=True)
        if self._sent:
            self._sent[self._last].record()


class HostInputs:
    """The columns of one shape in a host block, as NumPy arrays."""

    def __init__(
        self,
        block: Tensor,
        shape: Shape,
        groups: int,
        *,
        page_size: int,
        scratch: int,
        recurrent: bool,
        mrope: bool = False,
    ) -> None:
        """scratch: the lane of padding. recurrent: whether layers have a recurrent state. mrope: whether the model has
        M-RoPE
        """
        views = GraphInputs.of(block, shape, groups)
        self._shape, self._groups, self._page_size, self._scratch = shape, groups, page_size, scratch
        self._columns = {name: [view.numpy() for view in found] for name, found in views.columns.items()}
        self._sources, self._lanes = views.sources.numpy(), views.lanes.numpy()
        self._rope_rows = views.rope_rows.numpy() if mrope else None
        last_slot = SCRATCH * page_size + page_size - 1
        self._padding = {
            name: last_slot if column.padding is Padding.SCRATCH_SLOT else column.padding
            for name, column in COLUMNS.items()
            if column.padding is not Padding.COMPUTED and (recurrent or not column.recurrent)
        }

    def fill(self, layout: StepLayout, pending: Pending, lanes: list[int]) -> None:
        """Fills all columns. lanes: the lane of each sequence (page_lanes.py)."""
        self._sources[:] = KNOWN
        self._sources[pending[0]] = pending[1]
        _put(self._lanes, lanes, self._scratch)
        if self._rope_rows is not None:
            _put(self._rope_rows, rope_rows(layout), ROPE_ROWS.padding)
        for name, padding in self._padding.items():
            values, columns = VALUES[name](layout), self._columns[name]
            for column, each in zip(columns, values if COLUMNS[name].grouped else [values], strict=True):
                _put(column, each, padding)
        self._put_sequences(layout)

    def fill_padding(self) -> None:
        """Fills all columns with padding."""
        none, of_none = np.zeros(0, np.int64), np.zeros(0, np.int32)
        layout = StepLayout(
            [], self._page_size, self._groups, none, none, positions=none, query_start_loc=np.zeros(1, np.int32),
            seq_lens=of_none, logits_indices=none,
        )  # fmt: skip
        self.fill(layout, ([], []), [])

    def _put_sequences(self, layout: StepLayout) -> None:
        """Fills the columns whose padding is computed, so that the padding forms valid sequences."""
        query_start_loc, seq_lens, logits_indices = [
            self._columns[name][0] for name in ("query_start_loc", "seq_lens", "logits_indices")
        ]
        tokens = len(layout.positions)
        if self._shape.mixed:
            _put(query_start_loc, layout.query_start_loc, tokens)
            query_start_loc[-1] = self._shape.tokens
            _put(seq_lens, layout.seq_lens, 0)
            seq_lens[-1] = self._shape.tokens - tokens
            _put(logits_indices, layout.logits_indices, self._shape.tokens - 1)
        else:
            query_start_loc[:] = np.arange(self._shape.sequences + 1)
            _put(seq_lens, layout.seq_lens, 1)
            logits_indices[:] = np.arange(self._shape.rows)
        assert len(layout.seq_lens) + self._shape.mixed <= self._shape.sequences


def _put(column: NDArray[Any], values: NDArray[Any] | list[int], padding: int | Padding) -> None:
    column[: len(values)] = values
    column[len(values) :] = padding
