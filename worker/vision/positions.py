"""Position embeddings of patches: learned ones, which are stretched over any grid, and rotary ones.

Tables are computed on the CPU, so that all devices and any number of threads use the same bits.
"""

import torch
from torch import Tensor


def stretched(stored: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Returns a position embedding for each patch, [rows * columns, H] float32: a bilinear mean of the nearest four.

    stored [side * side, H]: the embeddings of a square grid whose corners are the corners of the picture
    """
    return _mixed(stored, side, _neighbours(rows, side), _neighbours(columns, side))


def resized(stored: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """Returns what `stretched` does, but resizes the square grid as `torch.nn.functional.interpolate` does a picture.

    The mode is bilinear, with `align_corners=False` and `antialias=True`. If the picture's grid is smaller than the
    stored grid, a result is the mean of more than four stored embeddings.
    """
    return _mixed(stored, side, _covered(rows, side), _covered(columns, side))


def by_axes(stored: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a position embedding for each patch, [rows * columns, H]: the sum of two, for its column and its row.

    stored [2, P, H]: the embeddings of columns, and of rows
    """
    total: Tensor = stored[0, None, :columns] + stored[1, :rows, None]
    return total.flatten(0, 1)


def _mixed(stored: Tensor, side: int, by_row: tuple[Tensor, Tensor], by_column: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the weighted mean of stored embeddings for each patch. They are added in a fixed order.

    by_row, by_column: the indices of the stored rows or columns that are read, and their weights; both [count, read]
    """
    (down, down_weights), (across, across_weights) = by_row, by_column
    total: Tensor | None = None
    for i in range(down.shape[1]):
        for j in range(across.shape[1]):
            index = (down[:, i, None] * side + across[None, :, j]).flatten().to(stored.device)
            weight = (down_weights[:, i, None] * across_weights[None, :, j]).flatten().to(stored.device)
            part = stored[index].float() * weight[:, None]
            total = part if total is None else total + part
    assert total is not None
    return total


def _neighbours(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns, for each of `count` points along an axis, the two stored indices around it, and weights: [count, 2]."""
    places = torch.arange(count, dtype=torch.float32) * (side - 1) / max(count - 1, 1)
    below = places.floor()
    share = places - below
    around = below.long()[:, None] + torch.arange(2)
    return around.clamp(max=side - 1), torch.stack([1 - share, share], dim=1)


def _covered(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Returns, for each of `count` equal parts of an axis, the stored indices under its triangle filter, and weights.

    The triangle is two parts wide, but never narrower than two stored steps.
    """
    scale = side / count
    reach = max(scale, 1.0)
    centres = scale * (torch.arange(count, dtype=torch.float32) + 0.5)
    first = (centres - reach + 0.5).clamp(min=0).long()
    around = first[:, None] + torch.arange(int(2 * reach) + 2)
    weights = (1 - (around + 0.5 - centres[:, None]).abs() / reach).clamp(min=0) * (around < side)
    return around.clamp(max=side - 1), weights / weights.sum(dim=1, keepdim=True)


def rotary_tables(
    rows: int, columns: int, head_dim: int, theta: float, device: torch.device, *, alternate: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for each patch, [rows * columns, head_dim] float32, in the order of rows.

    In both halves of a head, the first half rotates by the patch's row and the second half by its column.
    alternate: whether frequencies, from high to low, are given to rows and columns in turn; else rows and columns use
    the same ones
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    of_rows, of_columns = powers[0::2], powers[1::2] if alternate else powers[0::2]
    row = torch.arange(rows).repeat_interleave(columns)
    column = torch.arange(columns).repeat(rows)
    places = torch.arange(max(rows, columns), dtype=torch.float32)[:, None]
    by_row, by_column = (places * (1.0 / theta**each) for each in (of_rows, of_columns))

    def table(rows_of: Tensor, columns_of: Tensor) -> Tensor:
        return torch.cat([rows_of[row], columns_of[column]], dim=1).repeat(1, 2).to(device)

    return table(by_row.cos(), by_column.cos()), table(by_row.sin(), by_column.sin())
