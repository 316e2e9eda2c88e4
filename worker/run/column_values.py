"""Computes the values of each column (input tensor) of a step, on the host.

worker/model/inputs/forward_inputs.py declares the columns. This module knows nothing of devices, blocks or padding.
"""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.kernels.recurrent.recurrent_state import NO_STATE
from worker.schedule.records.sequence_states import slots_of
from worker.schedule.sequence import Chunk

PLACEHOLDER = 0  # stands for an id that only the device knows


@dataclass(frozen=True, slots=True)
class StepLayout:
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


def token_ids(layout: StepLayout) -> NDArray[np.int64]:
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


def slot_mappings(layout: StepLayout) -> list[NDArray[np.int64]]:
    """For each group of layers [T]: the slot that each row writes its K/V to. Reads only the pages with these slots."""
    one_row_each = len(layout.positions) == len(layout.chunks)
    written = _pages_of_rows(layout) if one_row_each else _pages_of_chunks(layout)
    offsets = layout.positions % layout.page_size
    return [pages * layout.page_size + offsets for pages in written]


def _pages_of_rows(layout: StepLayout) -> Iterator[NDArray[np.int64]]:
    """For each group, yields an array with the page of every row. Each chunk must have exactly one row."""
    size = layout.page_size
    at = [chunk.start // size for chunk in layout.chunks]
    for group in range(layout.groups):
        pages = [chunk.sequence.pages[group][page] for chunk, page in zip(layout.chunks, at, strict=True)]
        yield np.array(pages, np.int64)


def _pages_of_chunks(layout: StepLayout) -> Iterator[NDArray[np.int64]]:
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


def read_slots(layout: StepLayout) -> NDArray[np.int32]:
    """[S]: the slots of the recurrent states that the chunks begin with."""
    slots = [slots_of(chunk.sequence).at[chunk.start] if chunk.start else NO_STATE for chunk in layout.chunks]
    return np.array(slots, np.int32)


def write_slots(layout: StepLayout) -> NDArray[np.int32]:
    """[S]: the slots that the recurrent states after the chunks are written to."""
    return np.array([slots_of(chunk.sequence).free[-1] for chunk in layout.chunks], np.int32)


def rope_rows(layout: StepLayout) -> NDArray[np.int64]:
    """[T]: the row of the rotary tables for each row, with M-RoPE. No row may belong to a picture or be before one."""
    pictures = [chunk.sequence.pictures for chunk in layout.chunks]
    saved = [0 if one is None or one.rotary is None else one.rotary.saved for one in pictures]
    return layout.positions - np.array(saved, np.int64)[layout.chunk_of_row]


# Column name → function that returns its array, or for a grouped column, a list with an array for each group of layers.
VALUES: dict[str, Callable[[StepLayout], Any]] = {
    "token_ids": token_ids,
    "positions": lambda layout: layout.positions,
    "slot_mappings": slot_mappings,
    "query_start_loc": lambda layout: layout.query_start_loc,
    "seq_lens": lambda layout: layout.seq_lens,
    "logits_indices": lambda layout: layout.logits_indices,
    "read_slots": read_slots,
    "write_slots": write_slots,
}
