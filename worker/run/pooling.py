"""Makes one vector from a prompt: from its hidden states (the output of the final norm), or from its last logits.

A prompt may be computed in several steps. The bits of the vector do not depend on how the prompt is cut into steps,
because a row of hidden states depends on no other row of its step, and a mean adds the rows in the order of the tokens.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import Pooling, PoolingKind
from worker.run.in_flight import HostCopy, PooledRows
from worker.run.inputs import LogitsUse, to_device
from worker.schedule.sequence import Plan

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
        if pooling is not None and pooling.kind is PoolingKind.LOGITS:
            rows = logits(rows)[:, to_device(np.array(pooling.token_ids, np.int64), hidden.device)]
        parts.append((index, HostCopy(rows.float())))

    def read() -> list[PooledRows]:
        chunks = plan.chunks
        return [(chunks[index].sequence, chunks[index].start, copy.read().numpy()) for index, copy in parts]

    return read


class PromptVector:
    """Collects the rows of one prompt, and makes its vector from them."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: NDArray[np.float32] = np.zeros(0, np.float32)
        self._rows = 0  # the number of rows in the sum

    def add(self, start: int, rows: NDArray[np.float32]) -> None:
        """Adds the rows [N, D] that a step computed. start: the position of the first row.

        A preempted sequence begins again at position 0. For a mean, rows that do not continue the earlier rows are
        ignored: they come from a step that was in flight when the sequence was preempted.
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
