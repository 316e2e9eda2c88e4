"""Makes one vector of a prompt: from its hidden states (the output of the final norm), or from its last logits.

A prompt may be computed in several steps. The vector has the same bits however it is cut, because a row of hidden
states depends on no other row of its step, and because a mean adds the rows one by one in the order of the tokens.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import Pooling, PoolingKind
from worker.run.in_flight import HostCopy, PooledRows
from worker.run.inputs import LogitsUse, to_device
from worker.schedule.sequence import Plan

SHORTEST = 1e-12  # a vector is divided by its length, or by this number if it is shorter


def launch_pooling(
    plan: Plan, use: LogitsUse, hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> Callable[[], list[PooledRows]]:
    """Starts copying the rows that the prompts of a step contribute. Returns a function that waits for them.

    hidden: [R, H], see Decoder.hidden; logits: makes the logits [N, V] of such rows.
    """
    parts: list[tuple[int, HostCopy]] = []
    for index, first, count in use.pooled:
        pooling, rows = plan.chunks[index].sequence.pooling, hidden[first : first + count]
        if pooling is not None and pooling.kind is PoolingKind.LOGITS:
            rows = logits(rows)[:, to_device(np.array(pooling.token_ids, np.int64), hidden.device)]
        parts.append((index, HostCopy(rows.float())))

    def read() -> list[PooledRows]:
        chunks = plan.chunks
        return [(chunks[index].sequence, chunks[index].start, copy.read().numpy()) for index, copy in parts]

    return read


class PromptVector:
    """The vector of one prompt, while its rows arrive."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: NDArray[np.float32] = np.zeros(0, np.float32)
        self._rows = 0  # how many rows it is the sum of

    def add(self, start: int, rows: NDArray[np.float32]) -> None:
        """Adds the rows [N, D] that a step gave from position `start` on.

        A sequence that was preempted begins again at position 0. Rows of a mean that do not continue the others come
        from a step that was in flight at that time, and are ignored.
        """
        if self._pooling.kind is not PoolingKind.MEAN:
            self._sum, self._rows = rows[0], 1
            return
        if start == 0:
            self._sum, self._rows = np.zeros(rows.shape[1], np.float32), 0
        if start == self._rows:
            for row in rows:
                self._sum += row
            self._rows += len(rows)

    def values(self) -> bytes:
        """Returns the vector as packed float32. Raises ValueError if it is not finite."""
        vector = (self._sum / np.float32(max(1, self._rows)))[: self._pooling.dimensions or None]
        if not len(vector) or not np.isfinite(vector).all():
            raise ValueError("the model's output is not finite")
        if self._pooling.normalized and self._pooling.kind is not PoolingKind.LOGITS:
            wide = vector.astype(np.float64)
            vector = wide / max(np.sqrt(np.sum(wide * wide)), SHORTEST)
        return vector.astype("<f4").tobytes()
