"""M-RoPE: a token of a picture rotates by three positions, those of its time, row and column; text by three equal ones.

The tokens of a picture take as many positions as its longer side has tokens, and the text goes on after them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """The pictures of a prompt: where each begins, and its rows and columns of tokens."""

    starts: Sequence[int]
    squares: Sequence[tuple[int, int]]

    def between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the three positions of the tokens begin .. end - 1 of a sequence, [3, end - begin]."""
        found = np.tile(np.arange(begin, end), (3, 1))
        saved = 0  # positions that the pictures before have fewer than tokens
        last = bisect_right(self.starts, end - 1)
        for start, (rows, columns) in zip(self.starts[:last], self.squares[:last], strict=True):
            tokens = rows * columns
            first, after = max(begin, start), min(end, start + tokens)
            if first < after:
                index = np.arange(first, after) - start
                base = start - saved
                found[:, first - begin : after - begin] = base + np.stack(
                    [index * 0, index // columns, index % columns]
                )
            saved += tokens - max(rows, columns)
            if start + tokens < end:
                rest = max(begin, start + tokens)
                found[:, rest - begin :] = np.arange(rest, end) - saved
        return found


def components(sections: tuple[int, int, int], width: int, *, alternate: bool = True) -> list[int]:
    """Returns which of the three positions each column of a rotary table is read at.

    sections: pairs of a head that rotate by each position. alternate: whether these pairs alternate; else those of a
    section stand together. width: columns, whose halves are equal
    """
    half = [0] * (width // 2)
    if not alternate:
        together = [component for component, pairs in enumerate(sections) for _ in range(pairs)]
        return [*together, *half][: len(half)] * 2
    for component in (1, 2):
        for pair in range(component, min(3 * sections[component], len(half)), 3):
            half[pair] = component
    return half * 2
