"""Computes the log-probabilities that requests ask for, and makes messages from them.

The device computes the log-probabilities in the step. One copy brings the results of all requests to the host.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared import messages as m
from shared.messages import Pooling, PoolingKind
from worker.model_runner.inputs import LogitsUse, to_device
from worker.model_runner.step import HostCopy, PooledRows, StepLogprobs
from worker.ops.sampling import logprobs as row_logprobs
from worker.ops.sampling.reference import ranks as row_ranks
from worker.scheduler.host_budget import FEW
from worker.scheduler.sequence import Plan, Row, Sequence


@dataclass(frozen=True, slots=True)
class _Entry:
    """The contents of one message: rows first .. first + count - 1 of a block, each with its `top` likeliest tokens."""

    sequence: Sequence
    first: int
    count: int
    top: int
    start: int  # the index of the first row's token in the prompt or in the output
    prompt: bool = False  # whether the tokens are those of the prompt


@dataclass(frozen=True, slots=True)
class _Block:
    """The log-probabilities of the chosen token and of the T most likely tokens, for each of N rows."""

    chosen: Tensor  # [N] float32
    ids: Tensor  # [N, T] int64
    values: Tensor  # [N, T] float32
    ranks: Tensor  # [N] int64: the rank of the chosen token, from 1 on; 0 for output tokens
    entries: list[_Entry]

    def bits(self) -> Tensor:
        """Returns all numbers in one tensor [N * (2 + 2 T)] int32, which stores floats as their bits."""
        values = torch.cat([self.chosen, self.values.flatten()])
        return torch.cat([values.view(torch.int32), self.ids.flatten().int(), self.ranks.int()])


def launch_logprobs(
    plan: Plan, rows: list[Row], use: LogitsUse, logits: Tensor, sampled: Tensor, ids: Tensor
) -> Callable[[], StepLogprobs]:
    """Starts computing the log-probabilities that the requests of the step ask for.

    Returns a function that waits for them and makes the messages. A row after a draft has its message, too, whether or
    not the draft is accepted: the message begins at the output token that the row would give.

    rows: plan.rows at the launch of the step, before its outputs were counted as pending; logits: [N, V] float32;
    sampled: the rows of logits that ids are sampled from, in the order of `rows`;
    ids: the sampled ids, in the same order.
    """
    outputs = _output_blocks(sampled, ids, rows)
    blocks = [*outputs, *_prompt_blocks(logits, use, plan)]
    shapes = [(block.ids.shape, block.entries) for block in blocks]
    on_host = HostCopy(torch.cat([block.bits() for block in blocks]))

    def read() -> StepLogprobs:
        bits, messages = on_host.read().numpy(), StepLogprobs()
        for (count, top), entries in shapes:
            block, bits = np.split(bits, [count * (2 + 2 * top)])
            chosen, values, best, ranks = np.split(block, [count, count * (1 + top), count * (1 + 2 * top)])
            columns = (
                chosen.view(np.float32), best.reshape(count, top), values.view(np.float32).reshape(count, top), ranks,
            )  # fmt: skip
            messages.extend((entry.sequence, _message(entry, *columns)) for entry in entries)
        return messages

    return read


def _output_blocks(logits: Tensor, ids: Tensor, rows: list[Row]) -> Iterator[_Block]:
    asking = [(at, row) for at, row in enumerate(rows) if row[0].sampling.logprobs is not None]
    for group in _computed_together(asking):
        began = time.perf_counter()
        places = to_device(np.array([at for at, _ in group]), logits.device)
        entries = [
            _Entry(sequence, at, 1, sequence.sampling.logprobs or 0, output)
            for at, (_, (sequence, output, _)) in enumerate(group)
        ]
        chosen = ids[places].clamp(min=0)  # NO_ID becomes an id: the messages of these rows are not sent
        columns = row_logprobs(logits[places], chosen, max(entry.top for entry in entries))
        each = (time.perf_counter() - began) / len(group)  # on a GPU, the time of the launch
        for _, (sequence, *_) in group:
            if sequence.host is not None:
                sequence.host.scores = each
        yield _Block(*columns, torch.zeros_like(chosen), entries)


def _computed_together(asking: list[tuple[int, Row]]) -> list[list[tuple[int, Row]]]:
    """Groups the rows. Rows with more than FEW likeliest tokens are computed one by one, because a block is as wide as
    its widest row."""
    few = [one for one in asking if (one[1][0].sampling.logprobs or 0) <= FEW]
    many = [[one] for one in asking if (one[1][0].sampling.logprobs or 0) > FEW]
    return [few, *many] if few else many


def _prompt_blocks(logits: Tensor, use: LogitsUse, plan: Plan) -> Iterator[_Block]:
    for index, first, count in use.prompts:
        chunk, began = plan.chunks[index], time.perf_counter()
        sequence, start = chunk.sequence, chunk.first_scored
        targets = to_device(np.array(sequence.tokens[start : start + count]), logits.device)
        top = max(sequence.sampling.logprobs or 0, sequence.sampling.prompt_top)
        entry = _Entry(sequence, 0, count, top, start, prompt=True)
        scored = logits[first : first + count]
        block = _Block(*row_logprobs(scored, targets, entry.top), row_ranks(scored, targets), [entry])
        if sequence.host is not None and count:
            sequence.host.prompt, sequence.host.measured = (time.perf_counter() - began) / count, True
        yield block


def _message(
    entry: _Entry,
    chosen: NDArray[np.float32],
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    ranks: NDArray[np.int32],
) -> m.Logprobs:
    rows = slice(entry.first, entry.first + entry.count)
    return m.Logprobs(
        entry.sequence.key[1],
        entry.start,
        _packed(chosen[rows]),
        entry.top,
        _packed(ids[rows, : entry.top]),
        _packed(values[rows, : entry.top]),
        entry.prompt,
        _packed(ranks[rows]) if entry.prompt else b"",
    )


def _packed(numbers: NDArray[np.float32] | NDArray[np.int32]) -> bytes:
    """Returns the numbers row by row as little-endian bytes, the format of shared/wire.py."""
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes()


# Makes one vector from a prompt: from its hidden states (the output of the final norm), or from its last logits.
#
# A prompt may be computed in several steps. The bits of the vector do not depend on how the prompt is cut into steps,
# because a row of hidden states depends on no other row of its step, and a mean adds the rows in the order of the
# tokens.

OF_LOGITS = (PoolingKind.LOGITS, PoolingKind.LOGPROBS)
SHORTEST = 1e-12  # to normalize a vector, it is divided by its length, or by this number if the length is less


def launch_pooling(
    plan: Plan, use: LogitsUse, hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> Callable[[], list[PooledRows]]:
    """Starts to copy the rows that prompts contribute to their vectors. Returns a function that waits for the rows.

    hidden: [R, H], see Decoder.hidden; logits: computes the logits [N, V] of N rows of `hidden`.
    """
    parts: list[tuple[int, HostCopy]] = []
    for index, first, count in use.pooled:
        pooling, rows = plan.chunks[index].sequence.pooling, hidden[first : first + count]
        if pooling is not None and pooling.kind in OF_LOGITS:
            rows = _of_logits(logits(rows), pooling)
        parts.append((index, HostCopy(rows.float())))

    def read() -> list[PooledRows]:
        chunks = plan.chunks
        return [(chunks[index].sequence, chunks[index].start, copy.read().numpy()) for index, copy in parts]

    return read


def _of_logits(logits: Tensor, pooling: Pooling) -> Tensor:
    """Returns what a vector of this kind has of each row of logits [N, V]."""
    ids = to_device(np.array(pooling.token_ids, np.int64), logits.device)
    if pooling.kind is PoolingKind.LOGITS:
        return logits[:, ids]
    logits = logits.float()
    chosen, best, _ = row_logprobs(logits, ids[:1].expand(len(logits)), 1)
    # The difference of two logits is that of their log-probabilities. Ids of a float32 are exact up to 2**24.
    return torch.cat([logits[:, ids] - logits[:, ids[:1]] + chosen[:, None], best.float()], 1)


Rows = NDArray[np.float32]


def _added(total: Rows, rows: Rows) -> Rows:
    for row in rows:
        total += row
    return total


def _largest(total: Rows, rows: Rows) -> Rows:
    found: Rows = np.maximum(total, rows.max(axis=0))
    return found


def _behind(total: Rows, rows: Rows) -> Rows:
    return np.concatenate((total, rows.ravel()))


# How the vectors that need all rows are collected: from what a vector begins with, for rows of a width, and how it
# takes further rows.
COLLECTED: Mapping[PoolingKind, tuple[Callable[[int], Rows], Callable[[Rows, Rows], Rows]]] = {
    PoolingKind.MEAN: (lambda width: np.zeros(width, np.float32), _added),
    PoolingKind.MAX: (lambda width: np.full(width, -np.inf, np.float32), _largest),
    PoolingKind.TOKENS: (lambda width: np.zeros(0, np.float32), _behind),
}


class PromptVector:
    """Collects the rows of one prompt, and makes its vector from them."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: Rows = np.zeros(0, np.float32)
        self._rows = self._width = 0  # the number of rows in the total, and the length of each

    def add(self, start: int, rows: Rows) -> None:
        """Adds the rows [N, D] that a step computed. start: the position of the first row.

        A preempted sequence begins again at position 0. For a vector of all rows, rows that do not continue the earlier
        rows are ignored: they come from a step that was in flight when the sequence was preempted.
        """
        self._width = rows.shape[1]
        if self._pooling.kind not in COLLECTED:
            self._total, self._rows = rows[0], 1
            return
        begin, more = COLLECTED[self._pooling.kind]
        if start == 0:
            self._total, self._rows = begin(self._width), 0
        if start == self._rows:
            self._total = more(self._total, rows)
            self._rows += len(rows)

    def values(self) -> bytes:
        """Returns the vector, or those of all tokens, as packed float32. Raises ValueError if one is not finite."""
        kind, total = self._pooling.kind, self._total
        if kind is PoolingKind.MEAN:
            total = total / np.float32(max(1, self._rows))
        if not len(total) or not np.isfinite(total).all():
            raise ValueError("the model's output is not finite")
        vectors = total.reshape(-1, self._width)[:, : self._pooling.dimensions or None]
        if not self._pooling.normalized or kind in OF_LOGITS:
            return vectors.astype("<f4").tobytes()
        wide = [vector.astype(np.float64) for vector in vectors]
        normed = [vector / max(np.sqrt(np.sum(vector * vector)), SHORTEST) for vector in wide]
        return np.stack(normed).astype("<f4").tobytes()
