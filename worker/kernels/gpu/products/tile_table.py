"""The tiles of matrix products, as data: rules for every device, and tiles that were measured on a device.

A rule has the largest number of rows for which it holds, conditions on the product, and a tile. The first rule that
holds decides. The rules follow from the sizes of an H200. `python -m bench gpu --only sweep` measures better tiles on
its device, and writes them in the format of measured_tiles.json, which this file reads. measured_tiles.json has no
entries yet, because no device has been measured.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

NUM_SMS = 132  # multiprocessors of an H200, for which the tiles are chosen; other GPUs give the same bits
ANY = 1 << 62  # as a number of rows or programs: no limit
Chains = Literal["auto", "together", "split", "parked"]
Product = Literal["linear", "gated"]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a matrix product is divided among programs. No field may affect the bits.

    chains: how the chains are computed if K has several
        together: by one program, with two sums in its registers
        parked: by one program, with the sum of finished chains in memory (parked_linear.py)
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
FEW_ROWS = (  # several programs run on a multiprocessor, and prefetch enough of the weight to read it at full speed
    Rule(16, Tile(16, 64, 4, 8), programs=(0, 2 * NUM_SMS)), Rule(16, Tile(16, 64, 4, 6)),
    Rule(32, Tile(32, 64, 4, 8), programs=(0, 2 * NUM_SMS)), Rule(32, Tile(32, 64, 4, 6)),
    # In this rule and the following ones, reading the tokens once per tile takes as long as reading the weights.
    Rule(64, Tile(64, 128, 4, 4), programs=(96, ANY)), Rule(64, Tile(64, 64, 4, 6)),
    # Each chain of a tile has a program of its own, and the tile is half a square tile, because there are fewer square
    # tiles than multiprocessors.
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
PARKED_ELEMENTS = 256 * 128  # if a tile has so many elements, registers cannot hold a second sum


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
    together: Chains = "parked" if tile.rows * tile.columns >= PARKED_ELEMENTS else "together"
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
