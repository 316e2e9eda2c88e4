"""M-RoPE: a picture's token rotates by three positions: time, row and column. For a text token, all three are equal.

A picture takes as many positions as its longer side has tokens; the text after it continues from there.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """The pictures of a prompt: the index of the first token of each, and its rows and columns of tokens."""

    starts: Sequence[int]
    squares: Sequence[tuple[int, int]]

    @property
    def saved(self) -> int:
        """How many more tokens than positions the pictures have. The position of a token after all of them is its
        index minus this number, for all three.
        """
        return sum(rows * columns - max(rows, columns) for rows, columns in self.squares)

    def between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the three positions of the tokens begin .. end - 1 of a sequence, [3, end - begin]."""
        found = np.tile(np.arange(begin, end), (3, 1))
        saved = 0  # how many more tokens than positions the pictures so far have
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
    """Returns, for each column of a rotary table, which of a token's three positions selects the row that is read.

    sections: the number of pairs of a head that rotate by each position
    alternate: whether pairs of different sections alternate; else the pairs of a section are adjacent
    width: the number of columns; both halves are equal
    """
    half = [0] * (width // 2)
    if not alternate:
        together = [component for component, pairs in enumerate(sections) for _ in range(pairs)]
        return [*together, *half][: len(half)] * 2
    for component in (1, 2):
        for pair in range(component, min(3 * sections[component], len(half)), 3):
            half[pair] = component
    return half * 2
