"""Makes the tensors of ForwardInputs from a Plan, which consists of plain ints."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.messages import PoolingKind, Sampling
from worker.kv_cache.pages import SCRATCH
from worker.models.forward_inputs import COLUMNS, ForwardInputs
from worker.ops.recurrent_state import NO_STATE
from worker.scheduler.sequence import Chunk, Sequence, SequenceStates, slots_of

# Computes the values of each column (input tensor) of a step, on the host.
#
# worker/models/forward_inputs.py declares the columns. This part knows nothing of devices, blocks or padding.

PLACEHOLDER = 0  # stands for an id that only the device knows


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The chunks of a step, laid end to end. T: rows (tokens), S: chunks, R: rows of logits."""

    chunks: Seq[Chunk]
    page_size: int
    groups: int  # the number of groups of layers, each with its own page table
    starts: NDArray[np.int64]  # [S]: the position of each chunk's first row
    chunk_of_row: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [S+1]
    seq_lens: NDArray[np.int32]  # [S]
    logits_indices: NDArray[np.int64]  # [R]


def token_ids(layout: BatchMetadata) -> NDArray[np.int64]:
    """[T]: the token id of each row. Ids that only the device knows yet are PLACEHOLDER."""
    return np.fromiter(_each_token_id(layout.chunks), np.int64, len(layout.positions))


def _each_token_id(chunks: Seq[Chunk]) -> Iterator[int]:
    for chunk in chunks:
        if chunk.length == 1:
            tokens = chunk.sequence.tokens
            yield tokens[chunk.start] if chunk.start < len(tokens) else PLACEHOLDER
        else:
            yield from chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            yield from chunk.drafts


def slot_mappings(layout: BatchMetadata) -> list[NDArray[np.int64]]:
    """For each group of layers [T]: the slot that each row writes its K/V to. Reads only the pages with these slots."""
    one_row_each = len(layout.positions) == len(layout.chunks)
    written = _pages_of_rows(layout) if one_row_each else _pages_of_chunks(layout)
    offsets = layout.positions % layout.page_size
    return [pages * layout.page_size + offsets for pages in written]


def _pages_of_rows(layout: BatchMetadata) -> Iterator[NDArray[np.int64]]:
    """For each group, yields an array with the page of every row. Each chunk must have exactly one row."""
    size = layout.page_size
    at = [chunk.start // size for chunk in layout.chunks]
    for group in range(layout.groups):
        pages = [chunk.sequence.pages[group][page] for chunk, page in zip(layout.chunks, at, strict=True)]
        yield np.array(pages, np.int64)


def _pages_of_chunks(layout: BatchMetadata) -> Iterator[NDArray[np.int64]]:
    """For each group, yields an array with the page of every row, for chunks of any length."""
    size = layout.page_size
    first, last = layout.starts // size, (layout.seq_lens - 1) // size
    counts = last - first + 1
    page_of_row = layout.positions // size + (np.cumsum(counts) - counts - first)[layout.chunk_of_row]
    spans = list(zip(layout.chunks, first.tolist(), (last + 1).tolist(), strict=True))
    for group in range(layout.groups):
        written = array("i")
        for chunk, begin, end in spans:
            pages = chunk.sequence.pages[group]
            if end - begin == 1:
                written.append(pages[begin])
            else:
                written.extend(pages[begin:end])
        yield np.array(written, np.int64)[page_of_row]


def read_slots(layout: BatchMetadata) -> NDArray[np.int32]:
    """[S]: the slots of the recurrent states that the chunks begin with."""
    slots = [slots_of(chunk.sequence).at[chunk.start] if chunk.start else NO_STATE for chunk in layout.chunks]
    return np.array(slots, np.int32)


def write_slots(layout: BatchMetadata) -> NDArray[np.int32]:
    """[S]: the slots that the recurrent states after the chunks are written to."""
    return np.array([slots_of(chunk.sequence).free[-1] for chunk in layout.chunks], np.int32)


def rope_rows(layout: BatchMetadata) -> NDArray[np.int64]:
    """[T]: the row of the rotary tables for each row, with M-RoPE. No row may belong to an image or be before one."""
    images = [chunk.sequence.images for chunk in layout.chunks]
    saved = [0 if one is None or one.rotary is None else one.rotary.saved for one in images]
    return layout.positions - np.array(saved, np.int64)[layout.chunk_of_row]


# Column name → function that returns its array, or for a grouped column, a list with an array for each group of layers.
VALUES: dict[str, Callable[[BatchMetadata], Any]] = {
    "token_ids": token_ids,
    "positions": lambda layout: layout.positions,
    "slot_mappings": slot_mappings,
    "query_start_loc": lambda layout: layout.query_start_loc,
    "seq_lens": lambda layout: layout.seq_lens,
    "logits_indices": lambda layout: layout.logits_indices,
    "read_slots": read_slots,
    "write_slots": write_slots,
}


def dummy_sequence(tokens: list[int], page_size: int, groups: int, sampling: Sampling, seed: int = 0) -> Sequence:
    """Makes a sequence that belongs to no request. All its pages in all groups are the scratch page."""
    pages = [array("i", [SCRATCH]) * -(-len(tokens) // page_size) for _ in range(groups)]
    sequence = Sequence((b"", 0), tokens, len(tokens), sampling, seed, pages=pages)
    use_scratch_slot(sequence)
    return sequence


def use_scratch_slot(sequence: Sequence) -> None:
    """Lets every step of a sequence begin without a recurrent state, and write its state to the scratch slot."""
    sequence.states = SequenceStates(defaultdict(lambda: NO_STATE), [SCRATCH])


@dataclass(frozen=True, slots=True)
class LogitsUse:
    """Lists which rows of logits are sampled from, and which give log-probabilities of prompt tokens.

    ForwardInputs.logits_indices names R rows. The rows in `pooled` are pooled to vectors; all others have logits.
    """

    sampled: list[int]  # rows of logits that ids are sampled from, in plan order
    prompts: list[tuple[int, int, int]]  # for prompt log-probabilities: (chunk index, first row of logits, row count)
    pooled: list[tuple[int, int, int]] = field(default_factory=list)  # (chunk index, first of the R rows, row count)

    def with_logits(self, rows: int) -> NDArray[np.int64]:
        """Returns the indices of those of the R rows that have logits."""
        others = np.ones(rows, bool)
        for _, first, count in self.pooled:
            others[first : first + count] = False
        return np.flatnonzero(others)


def prepare_batch(chunks: Seq[Chunk], page_size: int) -> tuple[BatchMetadata, LogitsUse]:
    """Lays out chunks of any length. Returns the layout, and how the rows of logits are used."""
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    query_start_loc = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    logits_indices, use = _logits_indices(chunks, query_start_loc)
    layout = BatchMetadata(
        chunks,
        page_size,
        groups=len(chunks[0].sequence.pages),
        starts=starts,
        chunk_of_row=chunk_of_row,
        positions=np.arange(query_start_loc[-1]) + (starts - query_start_loc[:-1])[chunk_of_row],
        query_start_loc=query_start_loc,
        seq_lens=(starts + lengths).astype(np.int32),
        logits_indices=np.array(logits_indices, np.int64),
    )
    return layout, use


def lay_out_decodes(chunks: Seq[Chunk], page_size: int) -> BatchMetadata:
    """Lays out decodes: chunks of one token each, all sampled. Takes a quarter of the time of prepare_batch()."""
    positions, rows = np.array([chunk.start for chunk in chunks], np.int64), np.arange(len(chunks))
    return BatchMetadata(
        chunks,
        page_size,
        groups=len(chunks[0].sequence.pages),
        starts=positions,
        chunk_of_row=rows,
        positions=positions,
        query_start_loc=np.arange(len(chunks) + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        logits_indices=rows,
    )


def build_inputs(
    chunks: Seq[Chunk], page_size: int, device: torch.device, *, recurrent: bool = False
) -> tuple[ForwardInputs, LogitsUse]:
    """Makes ForwardInputs from chunks: computes them on the host, then copies each tensor to the device.

    recurrent: whether layers of the model have a recurrent state.
    """
    if all([_is_plain_decode(chunk) for chunk in chunks]):
        layout, use = lay_out_decodes(chunks, page_size), LogitsUse(list(range(len(chunks))), [])
    else:
        layout, use = prepare_batch(chunks, page_size)
    page_tables = _page_tables(chunks, layout.seq_lens, page_size)
    columns: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        if recurrent or not column.recurrent:
            values = VALUES[name](layout)
            if column.grouped:
                columns[name] = tuple([to_device(each, device) for each in values])
            else:
                columns[name] = to_device(values, device)
    inputs = ForwardInputs(
        **columns,
        page_tables=tuple([to_device(table, device) for table in page_tables]),
        max_kv_len=int(layout.seq_lens.max()),
        max_pages=tuple([int(table.max()) for table in page_tables]),
    )
    return inputs, use


def _is_plain_decode(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return (
        chunk.length == 1
        and chunk.samples
        and not chunk.drafts
        and sequence.pooling is None
        and not sequence.sampling.prompt_logprobs
    )


def _page_tables(chunks: Seq[Chunk], seq_lens: NDArray[np.int32], page_size: int) -> list[NDArray[np.int32]]:
    """Returns the page tables of all groups. A memoryview copies a few pages three times as fast as NumPy."""
    counts = -(-seq_lens // page_size)
    width, used, tables = int(counts.max()), counts.tolist(), []
    for group in range(len(chunks[0].sequence.pages)):
        table = np.zeros(len(chunks) * width, np.int32)
        rows, begin = memoryview(table.data), 0
        for chunk, count in zip(chunks, used, strict=True):
            rows[begin : begin + count] = chunk.sequence.pages[group][:count]
            begin += width
        tables.append(table.reshape(len(chunks), width))
    return tables


def _logits_indices(chunks: Seq[Chunk], query_start_loc: NDArray[np.int32]) -> tuple[list[int], LogitsUse]:
    indices: list[int] = []
    use, pooled = LogitsUse([], []), 0
    for number, (chunk, begin) in enumerate(zip(chunks, query_start_loc.tolist(), strict=False)):
        sequence = chunk.sequence
        if sequence.pooling is not None:
            rows = _pooled_rows(chunk, sequence.pooling.kind)
            if rows:
                use.pooled.append((number, len(indices), len(rows)))
                indices.extend(begin + row for row in rows)
                pooled += len(rows)
            continue
        if sequence.sampling.prompt_logprobs:
            end = min(chunk.start + chunk.length + 1, sequence.prompt_len)
            if (known := end - chunk.first_scored) > 0:
                use.prompts.append((number, len(indices) - pooled, known))
                first = begin + chunk.first_scored - 1 - chunk.start
                indices.extend(range(first, first + known))
        if chunk.drafts:
            first = len(indices) - pooled
            use.sampled.extend(range(first, first + chunk.rows))
            indices.extend(range(begin + chunk.length - chunk.rows, begin + chunk.length))
        elif chunk.samples:
            use.sampled.append(len(indices) - pooled)
            indices.append(begin + chunk.length - 1)
    return indices, use


def _pooled_rows(chunk: Chunk, kind: PoolingKind) -> range:
    """Returns the rows of a chunk that contribute to the vector of its prompt."""
    match kind:
        case PoolingKind.MEAN | PoolingKind.MAX | PoolingKind.TOKENS:
            return range(chunk.length)
        case PoolingKind.FIRST:
            return range(1 if chunk.start == 0 else 0)
        case _:
            ends = chunk.start + chunk.length == len(chunk.sequence.tokens)
            return range(chunk.length - ends, chunk.length)


def pending_tokens(chunks: Seq[Chunk], before: Seq[Chunk]) -> tuple[list[int], list[int]]:
    """Returns the rows whose tokens the host does not know yet, and their tokens' indices in the ids of `before`."""
    pending = [index for index, chunk in enumerate(chunks) if chunk.start >= len(chunk.sequence.tokens)]
    if not pending:
        return [], []
    source = {chunk.sequence: index for index, chunk in enumerate(chunk for chunk in before if chunk.samples)}
    starts = list(accumulate([chunk.length for chunk in chunks], initial=0))
    return [starts[index] for index in pending], [source[chunks[index].sequence] for index in pending]


def to_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copies an array to the device without waiting. On a GPU, later work in the stream runs after the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
