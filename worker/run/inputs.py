"""Where scheduling in plain ints becomes tensors: a Plan laid out as ForwardInputs. The only room that knows both."""

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

UNKNOWN = 0  # stands for an id that only the device knows yet


def dummy_sequence(tokens: list[int], page_size: int, sampling: Sampling, seed: int = 0) -> Sequence:
    """A sequence that is no request's: all its pages are the scratch page."""
    pages = array("i", [SCRATCH]) * -(-len(tokens) // page_size)
    return Sequence((b"", 0), tokens, len(tokens), sampling, seed, arrival=0.0, pages=pages)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Which of the R rows of logits are for what."""

    sampled: list[int]  # those that ids are sampled from, in plan order
    prompts: list[tuple[int, int, int]]  # (chunk index, first row, rows): log-probabilities of prompt tokens


def build_inputs(chunks: Seq[Chunk], page_size: int, device: torch.device) -> tuple[ForwardInputs, SamplingInputs]:
    """Lay the chunks end to end; host work only, one copy per tensor to the device."""
    lengths = [chunk.length for chunk in chunks]
    query_start_loc = np.fromiter(accumulate(lengths, initial=0), np.int32, len(chunks) + 1)
    seq_lens = np.fromiter((chunk.start + chunk.length for chunk in chunks), np.int32, len(chunks))
    token_ids = np.fromiter(_tokens(chunks), np.int64, int(query_start_loc[-1]))
    first = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(query_start_loc[-1], dtype=np.int64) - query_start_loc[chunk_of_row] + first[chunk_of_row]
    page_table = _page_table(chunks, seq_lens, page_size)
    slot_mapping = page_table[chunk_of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
    logits_indices, wanted = _rows(chunks, query_start_loc)
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
    return inputs, wanted


def _tokens(chunks: Seq[Chunk]) -> Iterator[int]:
    for chunk in chunks:
        if chunk.length == 1:
            tokens = chunk.sequence.tokens
            yield tokens[chunk.start] if chunk.start < len(tokens) else UNKNOWN
        else:
            yield from chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            yield from chunk.drafts


def _page_table(chunks: Seq[Chunk], seq_lens: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    used = -(-seq_lens // page_size)
    table = np.zeros((len(chunks), int(used.max())), np.int32)
    for row, chunk, n in zip(table, chunks, used.tolist(), strict=True):
        row[:n] = np.frombuffer(chunk.sequence.pages, np.int32, n)
    return table


def _rows(chunks: Seq[Chunk], query_start_loc: NDArray[np.int32]) -> tuple[list[int], SamplingInputs]:
    rows: list[int] = []
    wanted = SamplingInputs([], [])
    for index, (chunk, begin) in enumerate(zip(chunks, query_start_loc.tolist(), strict=False)):
        sequence = chunk.sequence
        if sequence.sampling.prompt_logprobs:
            known = max(0, min(chunk.length, sequence.prompt_len - 1 - chunk.start))
            if known:
                wanted.prompts.append((index, len(rows), known))
                rows.extend(range(begin, begin + known))
        if chunk.drafts:
            wanted.sampled.extend(range(len(rows), len(rows) + chunk.rows))
            rows.extend(range(begin + chunk.length - chunk.rows, begin + chunk.length))
        elif chunk.samples:
            wanted.sampled.append(len(rows))
            rows.append(begin + chunk.length - 1)
    return rows, wanted


def pending_tokens(chunks: Seq[Chunk], before: Seq[Chunk]) -> tuple[list[int], list[int]]:
    """Which rows' tokens are not known yet, and which of the ids sampled for `before` they will be."""
    unknown = [index for index, chunk in enumerate(chunks) if chunk.start >= len(chunk.sequence.tokens)]
    if not unknown:
        return [], []
    source = {chunk.sequence: index for index, chunk in enumerate(chunk for chunk in before if chunk.samples)}
    query_start_loc = list(accumulate([chunk.length for chunk in chunks], initial=0))
    return [query_start_loc[index] for index in unknown], [source[chunks[index].sequence] for index in unknown]


def to_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Without waiting: on a GPU it is there for all that its stream does from now on."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
