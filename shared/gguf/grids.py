"""The grids of IQ1, IQ2 and IQ3, read from the library `gguf`, which the worker may not import itself.

A grid has entries of four or eight numbers. A block of such a format has indices of entries instead of codes.
"""

from functools import cache


@cache
def grid(type: str) -> tuple[int, bytes]:
    """Returns how many numbers an entry of the grid has, and all entries, one after another.

    type: the name of a block format with a grid, for example IQ2_XS
    A number is one byte: its index among the different numbers of the grid, which are in ascending order.
    """
    import gguf.quants

    declared = getattr(gguf.quants, type)
    width, bits = declared.grid_shape[1], 2 if len(declared.grid_map) <= 4 else 4
    packed, mask = bytes.fromhex(declared.grid_hex.decode()), (1 << bits) - 1
    return width, bytes(byte >> shift & mask for byte in packed for shift in range(0, 8, bits))
