"""Divides the matrix products of triton.py: decides where K is split, and which tiles the programs compute.

Where K is split affects the bits, so this depends only on the weight's shape. Tiles do not affect the bits, so they may
depend on the number of rows and on the device. The tables are below.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from worker.ops.triton_common import FORMAT_CODES

# The tiles of matrix products, as data: rules for every device, and tiles that were measured on a device.
#
# A rule has the largest number of rows for which it holds, conditions on the product, and a tile. The first rule that
# holds decides. The rules follow from the sizes of an H200. `python -m bench gpu --only sweep` measures better tiles
# on its device, and writes them in the format of measured_tiles.json, which this file reads. measured_tiles.json has
# no entries yet, because no device has been measured.

NUM_SMS = 132  # multiprocessors of an H200, for which the tiles are chosen; other GPUs give the same bits
ANY = 1 << 62  # as a number of rows or programs: no limit
Chains = Literal["auto", "together", "split", "spilled"]
Product = Literal["linear", "gated"]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a matrix product is divided among programs. No field may affect the bits.

    chains: how the chains are computed if K has several
        together: by one program, with two sums in its registers
        spilled: by one program, with the sum of finished chains in memory (triton_accumulate.py)
        split: by one program for each chain if the caller can add partial sums, else like "together"
        auto: like "split" if "together" would give too few programs, else like "together"
    """

    rows: int  # tokens of a tile
    columns: int  # columns of the product in a tile, which are rows of the weight
    warps: int
    stages: int
    chains: Chains = "auto"

    def count(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.rows) * cdiv(columns, self.columns)

    def busiest_sm_elements(self, rows: int, columns: int) -> int:
        """Returns how many elements the multiprocessor with the most programs computes."""
        return cdiv(self.count(rows, columns), NUM_SMS) * self.rows * self.columns


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up. (triton.cdiv takes twenty times as long.)"""
    return -(-a // b)


class DeviceKind(NamedTuple):
    """A kind of GPU. name: PyTorch's name, or "" to ignore measured tiles; capability: for example, 90 for Hopper"""

    name: str
    capability: int


HOPPER = DeviceKind("", 90)


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts about a product that rules read.

    columns: columns of the result, or of gate if gate and up are computed together
    split: if true, the caller can add partial sums, so that each chain may have its own program
    """

    rows: int
    columns: int
    chains: int  # how many chains K has
    even: bool  # true if whole tiles cover the weight
    capability: int = 90  # compute capability of the device
    split: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A tile for products of at most `rows` rows. The other fields are further conditions.

    programs: the smallest and the largest number of programs, counted with one program per chain
    single: True: K must be one chain; False: K must be several chains; None: no condition
    even: if true, whole tiles must cover the weight
    instead: (another tile, factor): with the rule's tile, the busiest multiprocessor may compute at most `factor` times
        as many elements as with the other tile
    capabilities: the compute capabilities for which the tile compiles without spilled registers; empty: all
    """

    rows: int
    tile: Tile
    programs: tuple[int, int] = (0, ANY)
    single: bool | None = None
    even: bool = False
    instead: tuple[Tile, float] | None = None
    capabilities: tuple[int, ...] = ()

    def holds(self, shape: Shape) -> bool:
        least, most = self.programs
        programs = self.tile.count(shape.rows, shape.columns) * shape.chains
        fits = shape.rows <= self.rows and least <= programs <= most and (shape.even or not self.even)
        fits = fits and (not self.capabilities or shape.capability in self.capabilities)
        fits = fits and (self.tile.chains != "split" or shape.split)
        return fits and self.single in (None, shape.chains == 1) and self._busy_enough(shape)

    def _busy_enough(self, shape: Shape) -> bool:
        if self.instead is None:
            return True
        other, factor = self.instead
        busiest = self.tile.busiest_sm_elements(shape.rows, shape.columns)
        return busiest <= factor * other.busiest_sm_elements(shape.rows, shape.columns)


SQUARE, SMALL = Tile(128, 128, 8, 4), Tile(128, 64, 4, 3)
# With few rows, reading the weight takes the time. Several programs run on a multiprocessor, and prefetch enough of the
# weight to read it at full speed.
FEW_ROWS = (
    Rule(16, Tile(16, 64, 4, 8), programs=(0, 2 * NUM_SMS)), Rule(16, Tile(16, 64, 4, 6)),
    Rule(32, Tile(32, 64, 4, 8), programs=(0, 2 * NUM_SMS)), Rule(32, Tile(32, 64, 4, 6)),
    # In this rule and the following ones, reading the tokens once per tile takes as long as reading the weights.
    Rule(64, Tile(64, 128, 4, 4), programs=(96, ANY)), Rule(64, Tile(64, 64, 4, 6)),
    # There are fewer square tiles than multiprocessors, so the tile is half a square one, and each of its partial sums
    # over K has a program of its own.
    Rule(256, Tile(128, 64, 4, 4, "split"), single=False, capabilities=(80, 90, 100)),
)  # fmt: skip
LARGE = (
    Rule(128, SQUARE),
    Rule(ANY, Tile(256, 128, 8, 4), (2 * NUM_SMS, ANY), single=True, even=True, capabilities=(90, 100)),
)
RULES: Mapping[tuple[Product, str], tuple[Rule, ...]] = {  # by product and format of the tokens; "": all other formats
    ("linear", ""): (*FEW_ROWS, *LARGE, Rule(ANY, SQUARE)),
    # With fp8, a program keeps a second sum of each element, which needs too many registers in large tiles.
    ("linear", "float8_e4m3fn"): (*FEW_ROWS, Rule(ANY, SQUARE)),
    ("linear", "float32"): (Rule(16, Tile(16, 64, 4, 3)), Rule(ANY, Tile(64, 64, 4, 3))),  # without tensor cores
    ("gated", ""): (
        Rule(16, Tile(16, 64, 4, 6)), Rule(32, Tile(32, 64, 4, 5)), Rule(64, Tile(64, 64, 4, 4)),
        Rule(ANY, SQUARE, instead=(SMALL, 1.25)), Rule(ANY, SMALL),
    ),
    ("gated", "float32"): (Rule(16, Tile(16, 64, 4, 3)), Rule(ANY, Tile(32, 64, 4, 3))),
}  # fmt: skip


def default_tile(product: Product, dtype: str, shape: Shape) -> Tile:
    """Returns the tile that the rules choose. dtype: the format of the tokens, as a name from `format_name`"""
    rules = RULES.get((product, dtype)) or RULES[product, ""]
    return next(rule.tile for rule in rules if rule.holds(shape))


CANDIDATES: Mapping[Product, tuple[Tile, ...]] = {  # the tiles that a sweep compares; all compile without spills
    "linear": (
        *(Tile(rows, 64, 4, stages) for rows in (16, 32) for stages in (6, 8)),
        Tile(16, 128, 4, 5), Tile(32, 128, 4, 5), Tile(64, 64, 4, 4), Tile(64, 64, 4, 6), Tile(64, 128, 4, 3),
        Tile(64, 128, 4, 4), Tile(64, 128, 8, 4), Tile(64, 256, 8, 4), Tile(128, 64, 4, 3), Tile(128, 64, 4, 4),
        Tile(128, 128, 8, 3), SQUARE, Tile(128, 256, 8, 3), Tile(128, 256, 8, 4),
        Tile(256, 128, 8, 3), Tile(256, 128, 8, 4),
    ),
    "gated": (
        *(Tile(rows, 64, 4, stages) for rows in (16, 32) for stages in (4, 5, 6)), Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 4), Tile(64, 128, 8, 4), SMALL, Tile(128, 64, 4, 4), Tile(128, 128, 8, 3), SQUARE,
    ),
}  # fmt: skip
SPILLED_ELEMENTS = 256 * 128  # if a tile has so many elements, registers cannot hold a second sum


def candidates(product: Product, shape: Shape) -> Iterator[Tile]:
    """Yields tiles for a sweep, except those with far more or far fewer rows than the product."""
    for tile in CANDIDATES[product]:
        if not min(shape.rows, 512) // 4 <= tile.rows < max(32, 2 * shape.rows):
            continue
        for chains in _ways(tile, shape):
            yield Tile(tile.rows, tile.columns, tile.warps, tile.stages, chains)


def _ways(tile: Tile, shape: Shape) -> tuple[Chains, ...]:
    if shape.chains == 1:
        return ("auto",)
    together: Chains = "spilled" if tile.rows * tile.columns >= SPILLED_ELEMENTS else "together"
    return (together, "split")


Measured = Mapping[str, Mapping[str, list[list[Any]]]]  # device → product → list of [most rows, *fields of a Tile]
MEASURED: Measured = json.loads(Path(__file__).with_name("measured_tiles.json").read_text())


def product_name(product: Product, dtype: str, columns: int, depth: int) -> str:
    """Returns a product's name in measured_tiles.json. columns: the rows of the weight or, for a product of gate and
    up, the rows of gate
    """
    return f"{product} {dtype} {columns}x{depth}"


def measured_tile(table: Measured, device: str, name: str, rows: int) -> Tile | None:
    """Returns the fastest tile for the smallest measured number of rows that is at least `rows`.

    If `rows` is larger than all measured numbers, the largest measured number is used. Returns None if nothing was
    measured for this device and product.
    """
    entries = table.get(device, {}).get(name, [])
    fields = next((fields for most, *fields in entries if rows <= most), entries[-1][1:] if entries else None)
    return None if fields is None else Tile(*fields)


def measured_entry(rows: int, tile: Tile) -> list[Any]:
    return [rows, *astuple(tile)]


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
    """Returns the facts about a product that the rules read. A gated product always has one chain."""
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
    if products == 2 and dtype == torch.float8_e4m3fn:  # e4m3 needs registers for second sums, too (see triton.py)
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
