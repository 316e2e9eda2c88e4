"""Divides the matrix products of linear.py: decides where K is split, and which tiles the programs compute.

Where K is split affects the bits, so this depends only on the weight's shape. Tiles do not affect the bits, so they may
depend on the number of rows and on the device. tile_table.py has the tiles.
"""

from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from worker.kernels.gpu.products.tile_table import (
    HOPPER,
    MEASURED,
    NUM_SMS,
    DeviceKind,
    Product,
    Shape,
    Tile,
    cdiv,
    default_tile,
    measured_tile,
    product_name,
)
from worker.kernels.gpu.rowwise.quantize import FORMAT_CODES

CHAIN_STEP, MIN_CHAIN, MAX_CHAINS = 128, 256, 8
GROUP = 8


@lru_cache(maxsize=4096)
def chain_length(columns: int, depth: int) -> int:
    """Returns the length of the chains into which K is split. It depends only on the weight's shape.

    columns: of the whole product, also where a rank computes only some of them

    If a product has few columns, K is split so that there is a program for every multiprocessor.
    """
    chains = min(cdiv(NUM_SMS + 12, cdiv(columns, 64)), MAX_CHAINS, max(1, depth // MIN_CHAIN))
    return cdiv(cdiv(depth, chains), CHAIN_STEP) * CHAIN_STEP


@lru_cache(maxsize=4096)
def choose_tile(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: DeviceKind = HOPPER, *, split_k: bool = True
) -> Tile:
    """Returns the tile of a product. dtype: the tokens' dtype; split_k: true if the caller can add partial sums"""
    return _choose("linear", shape_of("linear", rows, columns, depth, dtype, device, split_k), depth, dtype, device)


@lru_cache(maxsize=4096)
def choose_gated_tile(rows: int, columns: int, depth: int, dtype: torch.dtype, device: DeviceKind = HOPPER) -> Tile:
    """Returns the tile of a gated product, in which gate and up have `columns` columns each."""
    return _choose("gated", shape_of("gated", rows, columns, depth, dtype, device), depth, dtype, device)


def _choose(product: Product, shape: Shape, depth: int, dtype: torch.dtype, device: DeviceKind) -> Tile:
    name = product_name(product, format_name(dtype), shape.columns, depth)
    return measured_tile(MEASURED, device.name, name, shape.rows) or default_tile(product, format_name(dtype), shape)


def shape_of(
    product: Product,
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    device: DeviceKind = HOPPER,
    split_k: bool = True,
) -> Shape:
    """Returns the facts about a product that the rules of tile_table.py read. A gated product always has one chain."""
    chains = cdiv(depth, chain_length(columns, depth)) if product == "linear" else 1
    even = columns % 128 == depth % (128 // dtype.itemsize) == 0
    return Shape(rows, columns, chains, even, device.capability, split_k)


def format_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


EXPERT_TILE_ROWS = (16, 32, 64, 128)


def expert_tile_rows(slots: int, experts: int, dtype: torch.dtype) -> int:
    """Returns how many rows a tile of a grouped product has: about as many as an expert has slots on average."""
    sizes = EXPERT_TILE_ROWS[:2] if dtype == torch.float32 else EXPERT_TILE_ROWS
    return next((size for size in sizes if slots <= size * experts), sizes[-1])


@lru_cache(maxsize=4096)
def choose_expert_tile(rows: int, columns: int, products: int, dtype: torch.dtype) -> Tile:
    """Returns the tile of a grouped product.

    rows: the rows of the tile, one of EXPERT_TILE_ROWS
    columns: the columns of each product
    products: 2 if gate and up are computed together, else 1
    dtype: the tokens' dtype in the product
    """
    if dtype == torch.float32:
        return Tile(rows, 64, 4, 3)
    if rows <= 32:
        return Tile(rows, 64, 4, {1: 8, 2: 6}[products] if rows == 16 else {1: 6, 2: 5}[products])
    if rows == 64:
        wide = products == 1 and columns % 128 == 0
        return Tile(64, 128, 4, 4) if wide else Tile(64, 64, 4, {1: 6, 2: 4}[products])
    if products == 2 and dtype == torch.float8_e4m3fn:  # e4m3 needs registers for second sums, too (see linear.py)
        return Tile(128, 64, 8, 4)
    return Tile(128, 128, 8, 4) if columns % 128 == 0 else Tile(128, 64, 4, {1: 4, 2: 3}[products])


def tile_constants(
    tile: Tile, columns: int, depth: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Returns the tile as kernel constants. dtype: the tokens' dtype; weight_dtype: the weight's dtype; None: the
    tokens' dtype
    """
    dynamic, weight_dtype = dtype in FORMAT_CODES, weight_dtype or dtype
    block_k = block_k_for(tile, dtype, weight_dtype)
    even = columns % tile.columns == 0 and depth % block_k == 0
    return {
        "EVEN": even, "FORMAT": 0 if dynamic else FORMAT_CODES.get(weight_dtype, 0), "DYNAMIC": dynamic,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": block_k, "GROUP": GROUP,
    }  # fmt: skip


def block_k_for(tile: Tile, dtype: torch.dtype, weight_dtype: torch.dtype) -> int:
    """Returns BLOCK_K: 128 bytes of a weight's row if there are few tokens, else 128 bytes of a token's row.

    If tokens are fp8, BLOCK_K affects the bits, so it must not depend on the tile.
    """
    few_tokens = tile.rows <= 64 and dtype.itemsize == 2
    return 128 // (weight_dtype if few_tokens else dtype).itemsize


def is_single_chain(weight: Tensor, whole_rows: int = 0) -> bool:
    """Returns whether a product with a weight [N, K] has a single chain, so that an element is one sum over K.

    whole_rows: see PackedLinear
    """
    columns, depth = weight.shape
    return chain_length(whole_rows or columns, depth) >= depth


def needs_split_k(rows: int, count: int, *chosen: Tile) -> bool:
    """Returns whether each chain of a product of `count` tiles should have its own program, if the caller can add
    partial sums.

    It should if the tile demands it, or if there are too few tiles to keep all multiprocessors busy.
    """
    if any(tile.chains != "auto" for tile in chosen):
        return any(tile.chains == "split" for tile in chosen)
    return count < (NUM_SMS if rows <= 64 else NUM_SMS // 2)


def stages_that_fit(tile: Tile, columns: int, x: Tensor, weight: Tensor) -> int:
    """Returns how many pipeline stages fit into shared memory, at most as many as the tile has.

    A stage has `columns` rows of the weight, and the tile's rows of x.
    """
    block_k = block_k_for(tile, x.dtype, weight.dtype)
    stage_bytes = (tile.rows * x.element_size() + columns * weight.element_size()) * block_k
    return stages_within(tile, stage_bytes, x.device, shared=tile.rows <= 32 and block_k > 64)


def stages_within(tile: Tile, stage_bytes: int, device: torch.device, *, shared: bool) -> int:
    """Returns how many stages of `stage_bytes` bytes fit into shared memory, at most as many as the tile has.

    shared: if true, two programs share a multiprocessor, and each has half of the memory
    """
    return max(1, min(tile.stages, shared_memory(device) // (2 if shared else 1) // stage_bytes))


@cache
def kind_of(device: torch.device, *, plain: bool = False) -> DeviceKind:
    """Returns the kind of a device, for the choice of tiles. plain: true if the weight has the tokens' dtype

    Tiles are measured only for plain weights, so the name is "" for all other weights.
    """
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceKind(torch.cuda.get_device_name(device) if plain else "", 10 * major + minor)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


@cache
def shared_memory(device: torch.device) -> int:
    """Returns how many bytes of shared memory one program can use."""
    if device.type != "cuda":
        return 1 << 30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
