"""Makes the tensors of ForwardInputs from a Plan, which consists of plain ints."""

from array import array
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from shared.messages import PoolingKind, Sampling
from worker.kernels.recurrent_state import NO_STATE
from worker.kv_cache.pages import SCRATCH
from worker.model.forward_inputs import ForwardInputs
from worker.schedule.sequence import Chunk, Sequence

PLACEHOLDER = 0  # stands in the inputs for an id that only the device knows


def dummy_sequence(tokens: list[int], page_size: int, groups: int, sampling: Sampling, seed: int = 0) -> Sequence:
    """Makes a sequence that belongs to no request. All its pages, in each group, are the scratch page."""
    pages = [array("i", [SCRATCH]) * -(-len(tokens) // page_size) for _ in range(groups)]
    sequence = Sequence((b"", 0), tokens, len(tokens), sampling, seed, arrival=0.0, pages=pages)
    use_scratch_slot(sequence)
    return sequence


def use_scratch_slot(sequence: Sequence) -> None:
    """Makes a sequence begin without a recurrent state at every position, and write its state to the scratch slot."""
    sequence.states, sequence.free_slots = defaultdict(lambda: NO_STATE), [SCRATCH]


@dataclass(frozen=True, slots=True)
class LogitsUse:
    """Lists which rows of logits are sampled from, and which give log-probabilities of prompt tokens.

    ForwardInputs.logits_indices names R rows. The rows in `pooled` make vectors; all other rows have logits.
    """

    sampled: list[int]  # rows of logits that ids are sampled from, in plan order
    prompts: list[tuple[int, int, int]]  # for prompt log-probabilities: (chunk index, first row of logits, row count)
    pooled: list[tuple[int, int, int]] = field(default_factory=list)  # (chunk index, first of the R rows, row count)

    def with_logits(self, rows: int) -> NDArray[np.int64]:
        """Returns which of the R rows have logits."""
        others = np.ones(rows, bool)
        for _, first, count in self.pooled:
            others[first : first + count] = False
        return np.flatnonzero(others)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The arrays of ForwardInputs on the host, but for the page tables. The chunks are one after another.

    T: tokens, S: chunks, R: rows of logits.
    """

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mappings: list[NDArray[np.int64]]  # of each group of layers: [T]
    query_start_loc: NDArray[np.int32]  # [S+1]
    seq_lens: NDArray[np.int32]  # [S]
    logits_indices: NDArray[np.int64]  # [R]
    use: LogitsUse
    read_slots: NDArray[np.int32] | None  # [S]; None without recurrent layers
    write_slots: NDArray[np.int32] | None  # [S]


def step_columns(chunks: Seq[Chunk], page_size: int, *, recurrent: bool = False) -> StepColumns:
    """Lays out any chunks. recurrent: whether layers of the model have a recurrent state."""
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    first_position = np.array([chunk.start for chunk in chunks], np.int64)
    query_start_loc = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(query_start_loc[-1]) + (first_position - query_start_loc[:-1])[chunk_of_row]
    logits_indices, use = _logits_indices(chunks, query_start_loc)
    read, write = state_slots(chunks) if recurrent else (None, None)
    return StepColumns(
        token_ids=np.fromiter(_token_ids(chunks), np.int64, len(positions)),
        positions=positions,
        slot_mappings=_slots(chunks, first_position, lengths, chunk_of_row, positions, page_size),
        query_start_loc=query_start_loc,
        seq_lens=(first_position + lengths).astype(np.int32),
        logits_indices=np.array(logits_indices, np.int64),
        use=use,
        read_slots=read,
        write_slots=write,
    )


def decode_columns(chunks: Seq[Chunk], page_size: int, *, recurrent: bool = False) -> StepColumns:
    """Lays out chunks of one token each, whose rows are sampled, in a quarter of the time of step_columns."""
    count, starts = len(chunks), [chunk.start for chunk in chunks]
    positions, pages = np.array(starts, np.int64), [start // page_size for start in starts]
    offsets, rows = positions % page_size, np.arange(count)
    groups = range(len(chunks[0].sequence.pages))
    of_group = ([chunk.sequence.pages[i][page] for chunk, page in zip(chunks, pages, strict=True)] for i in groups)
    read, write = state_slots(chunks) if recurrent else (None, None)
    return StepColumns(
        token_ids=np.fromiter(_token_ids(chunks), np.int64, count),
        positions=positions,
        slot_mappings=[np.array(written, np.int64) * page_size + offsets for written in of_group],
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        logits_indices=rows,
        use=LogitsUse(rows.tolist(), []),
        read_slots=read,
        write_slots=write,
    )


def build_inputs(
    chunks: Seq[Chunk], page_size: int, device: torch.device, *, recurrent: bool = False
) -> tuple[ForwardInputs, LogitsUse]:
    """Makes ForwardInputs of the chunks: works on the host, then makes one copy per tensor.

    recurrent: whether layers of the model have a recurrent state.
    """
    columns = step_columns(chunks, page_size, recurrent=recurrent)
    page_tables = _page_tables(chunks, columns.seq_lens, page_size)
    inputs = ForwardInputs(
        token_ids=to_device(columns.token_ids, device),
        positions=to_device(columns.positions, device),
        slot_mappings=tuple([to_device(slots, device) for slots in columns.slot_mappings]),
        query_start_loc=to_device(columns.query_start_loc, device),
        seq_lens=to_device(columns.seq_lens, device),
        page_tables=tuple([to_device(table, device) for table in page_tables]),
        logits_indices=to_device(columns.logits_indices, device),
        max_kv_len=int(columns.seq_lens.max()),
        max_pages=tuple([int(table.max()) for table in page_tables]),
        read_slots=None if columns.read_slots is None else to_device(columns.read_slots, device),
        write_slots=None if columns.write_slots is None else to_device(columns.write_slots, device),
    )
    return inputs, columns.use


def _slots(
    chunks: Seq[Chunk],
    first_position: NDArray[np.int64],
    lengths: NDArray[np.int64],
    chunk_of_row: NDArray[np.int64],
    positions: NDArray[np.int64],
    page_size: int,
) -> list[NDArray[np.int64]]:
    """Returns, for each group of layers, the slot that each row writes. Reads only the pages that have such slots."""
    first, last = first_position // page_size, (first_position + lengths - 1) // page_size
    counts = last - first + 1
    page_of_row = positions // page_size + (np.cumsum(counts) - counts - first)[chunk_of_row]
    offset, spans = positions % page_size, list(zip(chunks, first.tolist(), (last + 1).tolist(), strict=True))
    slots = []
    for group in range(len(chunks[0].sequence.pages)):
        written = array("i")
        for chunk, begin, end in spans:
            pages = chunk.sequence.pages[group]
            if end - begin == 1:
                written.append(pages[begin])
            else:
                written.extend(pages[begin:end])
        slots.append(np.array(written, np.int64)[page_of_row] * page_size + offset)
    return slots


def state_slots(chunks: Seq[Chunk]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns which slots for recurrent states the chunks read, and which ones they write."""
    read = [chunk.sequence.states[chunk.start] if chunk.start else NO_STATE for chunk in chunks]
    return np.array(read, np.int32), np.array([chunk.sequence.free_slots[-1] for chunk in chunks], np.int32)


def _token_ids(chunks: Seq[Chunk]) -> Iterator[int]:
    for chunk in chunks:
        if chunk.length == 1:
            tokens = chunk.sequence.tokens
            yield tokens[chunk.start] if chunk.start < len(tokens) else PLACEHOLDER
        else:
            yield from chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            yield from chunk.drafts


def _page_tables(chunks: Seq[Chunk], seq_lens: NDArray[np.int32], page_size: int) -> list[NDArray[np.int32]]:
    """Returns the page tables of all groups. A memoryview copies a few pages three times as fast as NumPy does."""
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
        case PoolingKind.MEAN:
            return range(chunk.length)
        case PoolingKind.FIRST:
            return range(1 if chunk.start == 0 else 0)
        case _:
            ends = chunk.start + chunk.length == len(chunk.sequence.tokens)
            return range(chunk.length - ends, chunk.length)


def pending_tokens(chunks: Seq[Chunk], before: Seq[Chunk]) -> tuple[list[int], list[int]]:
    """Returns the rows whose tokens the host does not know yet, and their indices in the ids sampled for `before`."""
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
