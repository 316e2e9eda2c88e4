"""Masks the tokens that grammars and rules about tokens forbid.

The mask of a row depends only on its own sequence. The logits of rows without a constraint keep their bits. A batch
without constraints costs only one check per row.
"""

import os
import time
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.model_runner.inputs import to_device
from worker.model_runner.sampler import stop_ids
from worker.scheduler.sequence import Row, Sequence
from worker.structured_output.masks_ahead import mask_bytes
from worker.structured_output.matcher import Restriction

if TYPE_CHECKING:
    from llguidance import LLExecutor

MIN_PARALLEL_BYTES = 1 << 16  # 4 masks of 128,000 tokens; for fewer bytes, waking a thread costs more than it saves

Bits = NDArray[np.uint8]  # [R, bytes]: one bit per token, the lowest bit of a byte first; 1: the token is allowed


class GrammarMask:
    """Masks the logits of a batch.

    `apply` must run before everything else that changes logits, so that no later change allows a forbidden token again.
    """

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._cores = len(os.sched_getaffinity(0))

    def apply(self, logits: Tensor, rows: list[Row]) -> tuple[Tensor, list[int]]:
        """Returns the logits [R, V] if nothing is forbidden, else a copy in which forbidden tokens are -inf.

        Also returns the rows after drafts whose ids must not be used: those behind a draft that the constraint forbids,
        and those in which it allows no token. Only a row without drafts before it, whose mask comes from the constraint
        itself, may end a sequence for want of a token.
        """
        if not any([sequence.constraint is not None for sequence, *_ in rows]):
            return logits, []
        parts = list(self._masks(rows))
        masked = [place for places, _ in parts for place in places]
        unusable = _after_drafts(rows) - {place for places, bits in parts for place in places if bits.any()}
        if not masked:
            return logits, sorted(unusable)
        forbidden = _unpack_bits(~np.concatenate([bits for _, bits in parts]), logits.device)[:, : logits.shape[1]]
        if masked == list(range(len(rows))):
            return logits.masked_fill(forbidden, -torch.inf), sorted(unusable)
        at = to_device(np.array(masked), logits.device)
        return logits.index_copy(0, at, logits[at].masked_fill_(forbidden, -torch.inf)), sorted(unusable)

    def _masks(self, rows: list[Row]) -> Iterator[tuple[list[int], Bits]]:
        """Yields (indices of rows, allowed tokens of these rows), for all rows in which some tokens are forbidden."""
        now = [place for place, row in enumerate(rows) if _masks_now(row)]
        if now:
            yield now, self._allowed([rows[place] for place in now], [_constraint(rows[place][0]) for place in now])
        for group in _groups_after_drafts(rows):
            host, began = rows[group[0]][0].host, time.perf_counter()
            first = 0.0 if host is None else host.mask
            for place, state in _states_ahead(rows, group):  # the next state reuses the same object
                yield [place], self._allowed([rows[place]], [state])
            if host is not None:  # the copy of the constraint counts, too
                host.mask = (first + time.perf_counter() - began) / (1 + len(group))

    def _allowed(self, rows: list[Row], constraints: list[Restriction]) -> Bits:
        """Returns the allowed tokens of each row. If a grammar allows no token, its `error` is set.

        Large batches use the threads of llguidance. Notes in each sequence how long its row took.
        """
        began = time.perf_counter()
        bits = np.zeros((len(rows), mask_bytes(self._vocab_size)), np.uint8)
        known = [one.prepared() for one in constraints]
        jobs = [
            (one.state, row)
            for row, (one, mask) in enumerate(zip(constraints, known, strict=True))
            if one.state is not None and mask is None
        ]
        address, width = bits.ctypes.data, bits.shape[1]
        if len(jobs) == len(rows) and self._cores > 2 and bits.size > MIN_PARALLEL_BYTES:
            self._executor.unsafe_compute_mask_ptr(jobs, address, width, len(jobs))
            each = (time.perf_counter() - began) / len(jobs)
            seconds = [each] * len(rows)
        else:
            seconds = [0.0] * len(rows)
            for row, mask in enumerate(known):
                if mask is not None:
                    bits[row], seconds[row] = mask
            for matcher, row in jobs:
                began = time.perf_counter()
                matcher.unsafe_compute_mask_ptr(address + row * width, width)
                seconds[row] = time.perf_counter() - began
        for allowed, took, (sequence, output, _), constraint in zip(bits, seconds, rows, constraints, strict=True):
            began = time.perf_counter()
            if constraint.state is None:
                allowed[:] = 0xFF
            constraint.narrow(allowed)
            if output < sequence.sampling.min_tokens:
                _forbid_end(allowed, list(stop_ids(sequence, self._eos_ids)))
            if sequence.host is not None:
                sequence.host.mask, sequence.host.rules = took, time.perf_counter() - began
        return bits

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()


def _masks_now(row: Row) -> bool:
    sequence, _, ahead = row
    return sequence.constraint is not None and not ahead and sequence.constraint.masks


def _constraint(sequence: Sequence) -> Restriction:
    return cast(Restriction, sequence.constraint)


def _after_drafts(rows: list[Row]) -> set[int]:
    """Returns the indices of the rows with a constraint that follow drafts."""
    return {place for place, (sequence, _, ahead) in enumerate(rows) if ahead and sequence.constraint is not None}


def _groups_after_drafts(rows: list[Row]) -> Iterator[list[int]]:
    """Yields the indices of the rows of one sequence, for each one with a constraint and drafts. See _after_drafts."""
    for _, group in groupby(sorted(_after_drafts(rows)), key=lambda place: rows[place][0]):
        yield list(group)


def _states_ahead(rows: list[Row], group: list[int]) -> Iterator[tuple[int, Restriction]]:
    """Yields each row of a group, with a copy of its constraint as if the sequence had sampled the drafts before it.

    If the constraint forbids a draft, or is complete, the later rows are left out, because nothing can reach them.
    """
    state = _constraint(rows[group[0]][0]).copy()
    for place in group:
        if not state.accept(rows[place][2][-1]) or state.ended:
            return
        yield place, state


def _forbid_end(mask: Bits, ids: list[int]) -> None:
    """Forbids the tokens `ids`, which would end the sequence too early. Does nothing if no other token is allowed."""
    rest = mask.copy()
    for id in ids:
        rest[id >> 3] &= ~np.uint8(1 << (id & 7))
    if rest.any():
        mask[:] = rest


def _unpack_bits(bits: Bits, device: torch.device) -> Tensor:
    """Unpacks [R, B] bytes to [R, 8 B] bools. Only the packed bits are copied to a GPU."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little")).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (to_device(bits, device)[:, :, None] >> places & 1).bool().flatten(1)
