"""Holds the inputs of captured steps as columns at fixed places in one block of memory.

The host fills a block and sends it in one copy. The device reads the same columns from its own block, which steps of
all shapes share. Entries of a column that a step does not need are padding. In a decode step, padding consists of
additional sequences of one token. In a mixed step, it consists of one additional sequence, the last of the shape, with
all padding tokens, and of sequences without tokens. Padding tokens have id 0 and position 0. They read and write only
the scratch page and the scratch slot, which no real row reads, so padding costs time but does not change any real row.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kv_cache.pages import SCRATCH
from worker.model_runner.inputs import VALUES, BatchMetadata, rope_rows, to_device
from worker.models.forward_inputs import COLUMNS, Extent, InputField, Padding
from worker.scheduler.sequence import Chunk

# Lists the shapes of the steps that are captured as CUDA graphs, and finds the shape that a step is padded to.
#
# There are two kinds of shapes. In a decode step, each sequence has one row, which is sampled. Every other step is a
# mixed step: it has prompt chunks or drafts, usually together with decodes. Steps with more than MOST_TOKENS tokens,
# and steps that would have too much padding, have no shape and run without a graph.

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences of a decode step
DECODE_KV_LENS = (512, 4096, 32768)  # values of max_kv_len for decode steps, besides the maximum sequence length
TOKENS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens of a mixed step
MIXED_KV_LENS = (4096,)  # values of max_kv_len for mixed steps, besides the maximum sequence length
MOST_TOKENS = TOKENS[-1]  # a larger step needs no graph: it computes for longer than the host needs to launch it
FEW_SEQUENCES = 16  # sequences of mixed steps with few decodes, so that the output head and sampling have few rows
FEW_ROWS = 64  # this many rows of logits cost hardly more than one, because reading the head's weights dominates
FREE_PADDING = 512  # up to this many tokens, padding costs less time than launching every kernel from the host
PADDING_SHARE = 4  # in a step of more tokens, at most 1 / PADDING_SHARE may be padding


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a captured step. Smaller steps are padded to these sizes."""

    tokens: int
    sequences: int  # in a mixed step, this includes one sequence for the padding tokens
    rows: int  # rows of logits
    max_kv_len: int  # the maximum number of positions that a sequence attends to

    @property
    def mixed(self) -> bool:
        """Whether a sequence may have several tokens, or none. Attention makes the same comparison."""
        return self.tokens > self.sequences

    def __str__(self) -> str:
        kind = f"{self.tokens} tokens of {self.sequences - 1} sequences" if self.mixed else f"{self.tokens} decodes"
        return f"{kind} of up to {self.max_kv_len} positions"


class Shapes:
    """All shapes of a worker, for steps of up to `max_batch_size` sequences and `max_step_tokens` tokens."""

    def __init__(self, max_batch_size: int, max_step_tokens: int, max_seq_len: int) -> None:
        self.max_batch_size, self._max_step_tokens, self._max_seq_len = max_batch_size, max_step_tokens, max_seq_len
        self._batch_sizes, self._decode_kv_lens = batch_sizes(max_batch_size), self._kv_lens(DECODE_KV_LENS)
        self._mixed = list(self._mixed_shapes())
        self.most_rows = max([max_batch_size, *(shape.rows for shape in self._mixed)])
        self.longest = max([max_seq_len, *(shape.max_kv_len for shape in self._mixed)])  # the largest max_kv_len

    def decode(self, sequences: int, longest: int) -> Shape | None:
        """Returns the shape for decodes that attend to at most `longest` positions, or None."""
        if sequences > self.max_batch_size or longest > self._max_seq_len:
            return None
        size = self._batch_sizes[bisect_left(self._batch_sizes, sequences)]
        return Shape(size, size, size, self._decode_kv_lens[bisect_left(self._decode_kv_lens, longest)])

    def mixed(self, tokens: int, sequences: int, rows: int, longest: int, *, apart: bool = False) -> Shape | None:
        """Returns the smallest shape for a mixed step, or None. rows: the number of rows of logits.

        apart: whether the shape must have fewer rows of logits than tokens
        """
        for shape in self._mixed:
            fits = tokens <= shape.tokens and sequences < shape.sequences and rows <= shape.rows
            if apart and shape.rows == shape.tokens:
                continue
            if fits and longest <= shape.max_kv_len:
                least = 0 if shape.tokens <= FREE_PADDING else shape.tokens - shape.tokens // PADDING_SHARE
                return shape if tokens >= least else None
        return None

    def all_shapes(self) -> Iterator[Shape]:
        """Yields every shape: first decodes, then mixed steps, each from the largest to the smallest.

        The memory that graphs share therefore has its final size after the first shapes.
        """
        for size, kv_len in product(reversed(self._batch_sizes), reversed(self._decode_kv_lens)):
            yield Shape(size, size, size, kv_len)
        yield from reversed(self._mixed)

    def _kv_lens(self, bounds: tuple[int, ...]) -> list[int]:
        return [*(bound for bound in bounds if bound < self._max_seq_len), self._max_seq_len]

    def _mixed_shapes(self) -> Iterator[Shape]:
        most = min(self._max_step_tokens, MOST_TOKENS)
        for tokens in [*(size for size in TOKENS if size < most), most]:
            many = min(tokens * 3 // 4, self.max_batch_size)
            for sequences in sorted({min(many, FEW_SEQUENCES), many} if many > FEW_ROWS else {many}):
                if sequences + 1 < tokens:
                    rows = max(sequences, min(tokens, FEW_ROWS))
                    lens = self._kv_lens(MIXED_KV_LENS)
                    yield from (Shape(tokens, sequences + 1, rows, max(kv_len, tokens)) for kv_len in lens)


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes that decodes and sampling are padded to, in ascending order up to `most`."""
    larger = range(BATCH_SIZES[-1] + 128, most, 128)
    return [*(size for size in (*BATCH_SIZES, *larger) if size < most), most]


ALIGN = 128  # columns begin at multiples of this many bytes, because Triton compiles kernels for aligned pointers
KNOWN = -1  # value of `sources`: the token is in `token_ids`
Pending = tuple[list[int], list[int]]  # rows whose tokens the host does not know, and their indices in the last ids
# the columns of a block that ForwardInputs does not have
SOURCES = InputField(torch.int64, Extent.TOKENS, KNOWN)  # index of the token in the ids of the last step, or KNOWN
TABLE_ROWS = InputField(torch.int32, Extent.SEQUENCES, Padding.COMPUTED)  # rows of the page tables
ROPE_ROWS = InputField(torch.int64, Extent.TOKENS, 0)  # ForwardInputs.rope_rows, for models with M-RoPE


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Views of the columns of a step in a block, with the lengths of its shape. `columns`: for ForwardInputs."""

    columns: dict[str, list[Tensor]]  # name → one tensor, or one for each group of layers
    sources: Tensor
    table_rows: Tensor
    rope_rows: Tensor

    @classmethod
    def of(cls, block: Tensor, shape: Shape, groups: int) -> "GraphInputs":
        """Makes views of the columns in a block. block: [inputs_bytes(shape, groups) or more] uint8."""
        columns: dict[str, list[Tensor]] = {}
        for name, view in views_of(block, _layout(shape, groups)):
            columns.setdefault(name, []).append(view)
        (sources,), (table_rows,), (rope_rows,) = (columns.pop(name) for name in ("sources", "table_rows", "rope_rows"))
        return cls(columns, sources, table_rows, rope_rows)

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
    for name, column in {**COLUMNS, "sources": SOURCES, "table_rows": TABLE_ROWS, "rope_rows": ROPE_ROWS}.items():
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
        """scratch: the row of padding. recurrent: whether layers have a recurrent state. mrope: whether the model has
        M-RoPE
        """
        views = GraphInputs.of(block, shape, groups)
        self._shape, self._groups, self._page_size, self._scratch = shape, groups, page_size, scratch
        self._columns = {name: [view.numpy() for view in found] for name, found in views.columns.items()}
        self._sources, self._table_rows = views.sources.numpy(), views.table_rows.numpy()
        self._rope_rows = views.rope_rows.numpy() if mrope else None
        last_slot = SCRATCH * page_size + page_size - 1
        self._padding = {
            name: last_slot if column.padding is Padding.SCRATCH_SLOT else column.padding
            for name, column in COLUMNS.items()
            if column.padding is not Padding.COMPUTED and (recurrent or not column.recurrent)
        }

    def fill(self, layout: BatchMetadata, pending: Pending, table_rows: list[int]) -> None:
        """Fills all columns. table_rows: the row of each sequence."""
        self._sources[:] = KNOWN
        self._sources[pending[0]] = pending[1]
        _put(self._table_rows, table_rows, self._scratch)
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
        layout = BatchMetadata(
            [], self._page_size, self._groups, none, none, positions=none, query_start_loc=np.zeros(1, np.int32),
            seq_lens=of_none, logits_indices=none,
        )  # fmt: skip
        self.fill(layout, ([], []), [])

    def _put_sequences(self, layout: BatchMetadata) -> None:
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


# Keeps the page tables of running sequences on the device, and sends only the pages that are new.
#
# Each running sequence has a row of the page tables. A step names the rows of its sequences, and the device
# gathers the step's page tables from these rows. When sequences come and go, no other pages have to be sent again.


@dataclass(slots=True, eq=False)
class _TableRow:
    number: int
    pages: "list[array[int]]"  # `pages` of the sequence; a new list object means that the sequence got new pages
    count: int = 0  # how many pages of each group are on the device


class DevicePageTables:
    """The rows of up to `table_rows` sequences with up to `pages` pages in each of `groups` groups of layers.

    tables: for each group [table_rows + 1, pages] int32. The last row, `scratch`, consists of the scratch page.
    """

    def __init__(self, table_rows: int, pages: int, groups: int, device: torch.device) -> None:
        self.tables = tuple(torch.zeros(table_rows + 1, pages, dtype=torch.int32, device=device) for _ in range(groups))
        self.scratch = table_rows
        self._pages, self._device = pages, device
        self._table_rows: dict[int, _TableRow] = {}  # id() of a sequence's `pages` → its row
        self._free = list(reversed(range(table_rows)))

    def rows_of(self, chunks: Seq[Chunk], page_size: int) -> list[int]:
        """Returns the rows of the chunks' sequences. Sends the pages of the chunks that are not on the device yet.

        Steps that are launched later in the stream see the new pages. Pages that a sequence has returned stay in the
        tables, because no row reads them.
        """
        numbers, missing = [], []
        for chunk in chunks:
            pages = chunk.sequence.pages
            table_row = self._table_rows.get(id(pages)) or self._new_row(pages, chunks)
            needed = (chunk.start + chunk.length - 1) // page_size + 1
            if table_row.count < needed:
                missing.append((table_row, needed))
            numbers.append(table_row.number)
        if missing:
            self._send(missing)
        return numbers

    def _new_row(self, pages: "list[array[int]]", chunks: Seq[Chunk]) -> _TableRow:
        if not self._free:
            kept = {id(chunk.sequence.pages) for chunk in chunks}
            for key in [key for key in self._table_rows if key not in kept]:
                self._free.append(self._table_rows.pop(key).number)
        table_row = self._table_rows[id(pages)] = _TableRow(self._free.pop(), pages)
        return table_row

    def _send(self, missing: list[tuple[_TableRow, int]]) -> None:
        at = [table_row.number * self._pages + np.arange(table_row.count, needed) for table_row, needed in missing]
        rows = [np.concatenate(at)]
        for group in range(len(self.tables)):
            new = [
                np.frombuffer(table_row.pages[group], np.int32)[table_row.count : needed]
                for table_row, needed in missing
            ]
            rows.append(np.concatenate(new))
        where, *pages = to_device(np.stack(rows).astype(np.int64), self._device)
        for table, new_pages in zip(self.tables, pages, strict=True):
            table.view(-1).index_copy_(0, where, new_pages.int())
        for table_row, needed in missing:
            table_row.count = max(table_row.count, needed)
