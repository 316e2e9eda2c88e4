"""How the products of linear_triton.py are shared out: where K is cut, and which tiles programs compute.

Where K is cut shows in the bits, so it follows from the weight's shape alone; tiles do not, and follow the row count.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from worker.kernels.gpu.quantize import CODES

PROCESSORS = 132  # of the GPU the tiles are made for; on another the bits are the same
CHAIN_STEP, MIN_CHAIN, MAX_CHAINS = 128, 256, 8
GROUP = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is shared out. No field may show in the bits."""

    rows: int  # tokens
    columns: int  # of the product; rows of the weight
    warps: int
    stages: int

    def count(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)

    def busiest(self, rows: int, columns: int) -> int:
        """Elements that the multiprocessor with most programs computes."""
        return cdiv(self.count(rows, columns), PROCESSORS) * self.rows * self.columns


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv takes twenty times as long."""
    return -(-a // b)


@lru_cache(maxsize=4096)
def chain_length(columns: int, depth: int) -> int:
    """Where K is cut: so that a narrow product of few rows still has a program for every multiprocessor.

    Of the weight's shape and nothing else.
    """
    chains = min(cdiv(PROCESSORS + 12, cdiv(columns, 64)), MAX_CHAINS, max(1, depth // MIN_CHAIN))
    return cdiv(cdiv(depth, chains), CHAIN_STEP) * CHAIN_STEP


@lru_cache(maxsize=4096)
def choose_tile(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """Few rows: many small programs, two or three to a multiprocessor. Many: what keeps the tensor cores busy."""
    chains = cdiv(depth, chain_length(columns, depth))
    if dtype == torch.float32:  # not for the tensor cores
        return Tile(16 if rows <= 16 else 64, 64, 4, 3)
    if rows <= 32:
        fits = cdiv(columns, 64) * chains <= 2 * PROCESSORS
        return Tile(16 if rows <= 16 else 32, 64, 4, 8 if fits else 6)
    if rows <= 64:  # by now reading the tokens once for each tile costs as much as the weights
        wide = cdiv(columns, 128) * chains >= 96
        return Tile(64, 128, 4, 4) if wide else Tile(64, 64, 4, 6)
    large = Tile(256, 128, 8, 4)
    plain = chains == 1 and columns % 128 == depth % (128 // dtype.itemsize) == 0
    plain = plain and dtype != torch.float8_e4m3fn  # leaves the registers for it: fp8 has a second sum of each element
    fills = rows > 128 and large.count(rows, columns) >= 2 * PROCESSORS
    return large if plain and fills else Tile(128, 128, 8, 4)


@lru_cache(maxsize=4096)
def choose_gated_tile(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """Each of gate and up has `columns`."""
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 4, 3)
    if rows <= 32:
        return Tile(16, 64, 4, 6) if rows <= 16 else Tile(32, 64, 4, 5)
    if rows <= 64:
        return Tile(64, 64, 4, 4)
    large, small = Tile(128, 128, 8, 4), Tile(128, 64, 4, 3)
    return large if large.busiest(rows, columns) <= 1.25 * small.busiest(rows, columns) else small


def tile_constants(
    tile: Tile, columns: int, depth: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> dict[str, int]:
    """The tile as the kernels' constants, for tokens of `dtype` and weights that are `stored` otherwise, if so."""
    dynamic, stored = dtype in CODES, stored or dtype
    block_k = step_of(tile, dtype, stored)
    even = columns % tile.columns == 0 and depth % block_k == 0
    return {
        "EVEN": even, "FORMAT": 0 if dynamic else CODES.get(stored, 0), "DYNAMIC": dynamic, "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns, "BLOCK_K": block_k, "GROUP": GROUP,
    }  # fmt: skip


def step_of(tile: Tile, dtype: torch.dtype, stored: torch.dtype) -> int:
    """Numbers of a row in a stage: a line of 128 bytes, of a weight if tokens are few, or else of a token. Where tokens
    are of fp8 it shows in the bits and may not follow the tile."""
    few = tile.rows <= 64 and dtype.itemsize == 2
    return 128 // (stored if few else dtype).itemsize


def uncut(weight: Tensor) -> bool:
    """Whether each element of a product with weight [N, K] is a single chain."""
    return chain_length(*weight.shape) >= weight.shape[1]


def stages_of(tile: Tile, columns: int, x: Tensor, weight: Tensor) -> int:
    """As many of the tile's as this device has shared memory for; `columns` rows of weights are in each."""
    step = step_of(tile, x.dtype, weight.dtype)
    stage = (tile.rows * x.element_size() + columns * weight.element_size()) * step
    shared = _shared_memory(x.device) // (2 if tile.rows <= 32 and step > 64 else 1)  # longer steps, of two programs
    return max(1, min(tile.stages, shared // stage))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
