"""Which tokens a batch's grammars allow next, and logits without the others. Knows sequences and bits.

A row is its own sequence's alone; rows without a grammar keep their bits, and a batch without any pays one look.
"""

import os
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.grammar.matcher import Matcher
from worker.run.inputs import to_device
from worker.run.sampler import stop_ids
from worker.schedule.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLExecutor

SHARED = 1 << 16  # bytes of masks, 4 rows of 128,000 tokens: below that, to wake a thread costs more than it saves

Bits = NDArray[np.uint8]  # [R, bytes]: bit i of a row is token i, from the lowest


class GrammarMask:
    """`apply` comes before everything else that changes logits, so nothing revives a forbidden token."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._cores = len(os.sched_getaffinity(0))

    def apply(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """logits [R, V] -> the same, or a copy in which forbidden tokens are -inf."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.constraint is not None]
        if not rows:
            return logits
        bits = self._allowed([sequences[row] for row in rows])
        forbidden = _unpacked(~bits, logits.device)[:, : logits.shape[1]]
        if len(rows) == len(sequences):
            return logits.masked_fill(forbidden, -torch.inf)
        at = to_device(np.array(rows), logits.device)
        return logits.index_copy(0, at, logits[at].masked_fill_(forbidden, -torch.inf))

    def _allowed(self, sequences: list[Sequence]) -> Bits:
        """Much work is shared out to the library's threads. A grammar that has no way on has an `error` afterwards."""
        bits = np.zeros((len(sequences), (self._vocab_size + 31) // 32 * 4), np.uint8)
        matchers = [cast(Matcher, sequence.constraint).state for sequence in sequences]
        address, width = bits.ctypes.data, bits.shape[1]
        if self._cores > 2 and bits.size > SHARED:
            jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, address, width, len(jobs))
        else:
            for at, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + at * width, width)
        for row, sequence in zip(bits, sequences, strict=True):
            if sequence.output_len < sequence.sampling.min_tokens:
                _hold_back(row, list(stop_ids(sequence, self._eos_ids)))
        return bits

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()


def _hold_back(row: Bits, ids: list[int]) -> None:
    """Forbids what would end the sequence before its `min_tokens`, unless the grammar allows nothing else."""
    rest = row.copy()
    for id in ids:
        rest[id >> 3] &= ~np.uint8(1 << (id & 7))
    if rest.any():
        row[:] = rest


def _unpacked(bits: Bits, device: torch.device) -> Tensor:
    """[R, B] -> bool [R, 8 B]; to a GPU only the bits travel."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little")).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (to_device(bits, device)[:, :, None] >> places & 1).bool().flatten(1)
