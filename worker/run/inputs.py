"""Makes the tensors of ForwardInputs from a Plan, which consists of plain ints."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from shared.messages import Sampling
from worker.kv_cache.pages import SCRATCH
from worker.model.forward_inputs import ForwardInputs
from worker.schedule.sequence import Chunk, Sequence

PLACEHOLDER = 0  # stands in the inputs for an id that only the device knows


def dummy_sequence(tokens: list[int], page_size: int, sampling: Sampling, seed: int = 0) -> Sequence:
    """Makes a sequence that belongs to no request. All its pages are the scratch page."""
    pages = array("i", [SCRATCH]) * -(-len(tokens) // page_size)
    return Sequence((b"", 0), tokens, len(tokens), sampling, seed, arrival=0.0, pages=pages)


@dataclass(frozen=True, slots=True)
class LogitsUse:
    """Lists which of the R rows of logits are sampled from, and which give log-probabilities of prompt tokens."""

    sampled: list[int]  # rows that ids are sampled from, in plan order
    prompts: list[tuple[int, int, int]]  # for prompt log-probabilities: (chunk index, first row, row count)


def build_inputs(chunks: Seq[Chunk], page_size: int, device: torch.device) -> tuple[ForwardInputs, LogitsUse]:
    """Makes ForwardInputs with the chunks one after another: works on the host, then makes one copy per tensor."""
    lengths = [chunk.length for chunk in chunks]
    query_start_loc = np.fromiter(accumulate(lengths, initial=0), np.int32, len(chunks) + 1)
    seq_lens = np.fromiter((chunk.start + chunk.length for chunk in chunks), np.int32, len(chunks))
    token_ids = np.fromiter(_token_ids(chunks), np.int64, int(query_start_loc[-1]))
    first_position = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    row_in_chunk = np.arange(query_start_loc[-1], dtype=np.int64) - query_start_loc[chunk_of_row]
    positions = row_in_chunk + first_position[chunk_of_row]
    page_table = _page_table(chunks, seq_lens, page_size)
    slot_mapping = page_table[chunk_of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
    logits_indices, use = _logits_indices(chunks, query_start_loc)
    inputs = ForwardInputs(
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        slot_mapping=to_device(slot_mapping, device),
        query_start_loc=to_device(query_start_loc, device),
        seq_lens=to_device(seq_lens, device),
        page_table=to_device(page_table, device),
        logits_indices=to_device(np.asarray(logits_indices, np.int64), device),
        max_kv_len=int(seq_lens.max()),
        max_page=int(page_table.max()),
    )
    return inputs, use


def _token_ids(chunks: Seq[Chunk]) -> Iterator[int]:
    for chunk in chunks:
        if chunk.length == 1:
            tokens = chunk.sequence.tokens
            yield tokens[chunk.start] if chunk.start < len(tokens) else PLACEHOLDER
        else:
            yield from chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            yield from chunk.drafts


def _page_table(chunks: Seq[Chunk], seq_lens: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    counts = -(-seq_lens // page_size)
    table = np.zeros((len(chunks), int(counts.max())), np.int32)
    for row, chunk, count in zip(table, chunks, counts.tolist(), strict=True):
        row[:count] = np.frombuffer(chunk.sequence.pages, np.int32, count)
    return table


def _logits_indices(chunks: Seq[Chunk], query_start_loc: NDArray[np.int32]) -> tuple[list[int], LogitsUse]:
    indices: list[int] = []
    use = LogitsUse([], [])
    for number, (chunk, begin) in enumerate(zip(chunks, query_start_loc.tolist(), strict=False)):
        sequence = chunk.sequence
        if sequence.sampling.prompt_logprobs:
            known = max(0, min(chunk.length, sequence.prompt_len - 1 - chunk.start))
            if known:
                use.prompts.append((number, len(indices), known))
                indices.extend(range(begin, begin + known))
        if chunk.drafts:
            use.sampled.extend(range(len(indices), len(indices) + chunk.rows))
            indices.extend(range(begin + chunk.length - chunk.rows, begin + chunk.length))
        elif chunk.samples:
            use.sampled.append(len(indices))
            indices.append(begin + chunk.length - 1)
    return indices, use


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
