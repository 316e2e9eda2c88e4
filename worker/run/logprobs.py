"""The log-probabilities that requests ask for, as messages. Knows logits, sequences and plans; decides nothing.

They are computed with the step and come to the host in one copy, whoever asked for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared import messages as m
from shared.codec import pack_f32, pack_u32
from worker.kernels.sample import logprobs as row_logprobs
from worker.run.in_flight import HostCopy
from worker.run.inputs import SamplingInputs, to_device
from worker.schedule.sequence import Plan, Sequence

Told = list[tuple[Sequence, m.Logprobs]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Rows [first, first + count) of a block, with their `top` best tokens, are one message."""

    sequence: Sequence
    first: int
    count: int
    top: int
    start: int | None = None  # index of the first row's token in the prompt; None: it is the output's next


@dataclass(frozen=True, slots=True)
class _Block:
    """Of N rows, the log-probabilities of one token and of the T most likely."""

    chosen: Tensor  # [N] float32
    ids: Tensor  # [N, T] int64
    values: Tensor  # [N, T] float32
    entries: list[_Entry]

    def bits(self) -> Tensor:
        """[N * (1 + 2 T)] int32."""
        values = torch.cat([self.chosen, self.values.flatten()])
        return torch.cat([values.view(torch.int32), self.ids.flatten().int()])


def launch_logprobs(
    plan: Plan, wanted: SamplingInputs, logits: Tensor, sampled: Tensor, ids: Tensor
) -> Callable[[], Told]:
    """What is asked of this step; call the result, once the step before has been committed, to wait for it.

    logits [R, V] float32; sampled, the rows of it that are sampled from, and ids, what was sampled, in the order of
    plan.rows.
    """
    outputs = _outputs(sampled, ids, [sequence for sequence, _ in plan.rows])
    blocks = [*outputs, *_prompts(logits, wanted, plan)]
    shapes = [(block.ids.shape, block.entries) for block in blocks]
    host_ids = HostCopy(torch.cat([block.bits() for block in blocks]))

    def read() -> Told:
        bits, told = host_ids.read().numpy(), Told()
        for (rows, top), entries in shapes:
            block, bits = np.split(bits, [rows * (1 + 2 * top)])
            chosen, values, best = np.split(block, [rows, rows * (1 + top)])
            columns = chosen.view(np.float32), best.reshape(rows, top), values.view(np.float32).reshape(rows, top)
            told.extend((entry.sequence, _message(entry, *columns)) for entry in entries)
        return told

    return read


def _outputs(logits: Tensor, ids: Tensor, sequences: list[Sequence]) -> Iterator[_Block]:
    asking = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    if asking:
        rows = to_device(np.array([row for row, _ in asking]), logits.device)
        entries = [_Entry(sequence, at, 1, sequence.sampling.logprobs or 0) for at, (_, sequence) in enumerate(asking)]
        yield _Block(*row_logprobs(logits[rows], ids[rows], max(entry.top for entry in entries)), entries)


def _prompts(logits: Tensor, wanted: SamplingInputs, plan: Plan) -> Iterator[_Block]:
    for index, first, count in wanted.prompts:
        chunk = plan.chunks[index]
        sequence, start = chunk.sequence, chunk.start + 1
        targets = to_device(np.array(sequence.tokens[start : start + count]), logits.device)
        entry = _Entry(sequence, 0, count, sequence.sampling.logprobs or 0, start)
        yield _Block(*row_logprobs(logits[first : first + count], targets, entry.top), [entry])


def _message(
    entry: _Entry, chosen: NDArray[np.float32], ids: NDArray[np.int32], values: NDArray[np.float32]
) -> m.Logprobs:
    rows = slice(entry.first, entry.first + entry.count)
    return m.Logprobs(
        entry.sequence.key[1],
        entry.sequence.output_len if entry.start is None else entry.start,
        pack_f32(chosen[rows].tolist()),
        entry.top,
        pack_u32(ids[rows, : entry.top].flatten().tolist()),
        pack_f32(values[rows, : entry.top].flatten().tolist()),
        entry.start is not None,
    )
