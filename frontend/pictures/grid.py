"""Chooses how many tiles a picture is cut into, as the image processor of LFM2-VL does in transformers."""


def is_cut(width: int, height: int, step: int, above: int) -> bool:
    """Says whether a picture, rounded to multiples of `step`, has more than `above` pixels."""
    across, down = (max(step // 2, round(side / step) * step) for side in (width, height))
    return across * down > above


def best_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Returns the columns and rows of the grid whose shape is nearest to the picture's, with `least` to `most` tiles.

    If several grids have this shape, a larger grid is taken as long as the picture, in its own size, would fill more
    than half of the grid.
    """
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    grids = sorted((one for one in grids if one[0] * one[1] >= least), key=lambda one: one[0] * one[1])
    best, nearest = (1, 1), float("inf")
    for columns, rows in grids:
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and 2 * width * height > tile * tile * columns * rows):
            best, nearest = (columns, rows), away
    return best
