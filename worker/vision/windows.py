"""Windows: in most layers of some towers, a patch sees only the patches of its own square window of the picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """Rows that lie one window after another. lengths: how many rows each window has, never 0"""

    lengths: tuple[int, ...]

    @property
    def begins(self) -> list[int]:
        return list(accumulate(self.lengths[:-1], initial=0))

    def parts(self, first: int, end: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yields the rows first .. end - 1 in parts of at most `most` rows of one window.

        A part is (index of the window, first row, end).
        """
        for index, (begin, length) in enumerate(zip(self.begins, self.lengths, strict=True)):
            for start in range(max(first, begin), min(end, begin + length), most):
                yield index, start, min(start + most, end, begin + length)


def in_windows(rows: int, columns: int, side: int) -> tuple[Tensor, Windows]:
    """Returns the indices of the patches of a grid, window by window, and the windows. Indices count row by row.

    side: patches along a side of a window; windows at the right and at the bottom may be smaller
    """
    grid = torch.arange(rows * columns).view(rows, columns)
    corners = [(row, column) for row in range(0, rows, side) for column in range(0, columns, side)]
    squares = [grid[row : row + side, column : column + side].flatten() for row, column in corners]
    return torch.cat(squares), Windows(tuple(map(len, squares)))
