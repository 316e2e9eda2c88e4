"""Measures candidate tiles for each weight of a model and each number of rows. Writes the best tiles as a table.

The table is a copy of worker/ops/linear/measured_tiles.json with this device's entries added, so it can
replace that file. A tile can be chosen only if its product has the same bits as the tile that is used now.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.checks.random_inputs import RandomTensors
from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.measure.isolated_kernels import MIN_TOTAL_BYTES, products
from bench.gpu.tables import FAIL, PASS
from worker.ops.linear import gated_linear, linear
from worker.ops.linear import triton_tiles as tiles
from worker.ops.linear.cublas import FEWEST_ROWS, cublas_linear
from worker.ops.linear.packed import pack
from worker.ops.linear.triton import gated_linear_triton, linear_triton
from worker.ops.linear.triton_tiles import MEASURED, Product, Tile, candidates, measured_entry, product_name
from worker.ops.norm.reference import sum_split_k
from worker.spec import Activation

HEAD_ROWS = 512  # largest number of rows for the head, because a step computes few rows of logits
WORTH = 1.02  # how many times faster a tile must be to replace the one that is used now
NEED_S = 5.0
CPU_TILES = 3  # number of tiles tried without a GPU, where tiles have no effect


@torch.inference_mode()
def measure(env: Environment, model: str) -> Iterator[Row]:
    spec = spec_of(model)
    for name, (n, k) in products(spec).items():
        one_kernel = name == "gate_up" and tiles.chain_length(n, k) >= k
        swept = SweptWeight(env, n, k, gated=spec.activation if one_kernel else None, wide=name == "head")
        entries: list[list[Any]] = []
        for rows in env.sizes.sweep:
            if swept.wide and rows > HEAD_ROWS:
                continue
            row: Row = {"model": model, "weight": f"{name} {n} x {k}", "rows": rows}
            if late := env.skip_reason(NEED_S):
                yield row | {"note": late}
                continue
            best, figures = swept.sweep(rows)
            entries.append(measured_entry(rows, best))
            yield row | figures
        if env.tiles and entries:
            add_entries(env.tiles, swept.device, swept.name, entries)


class SweptWeight:
    """A weight [n, k] to measure. It has several copies, which together do not fit in a cache."""

    def __init__(self, env: Environment, n: int, k: int, *, gated: Activation | None, wide: bool) -> None:
        """gated: the activation if one kernel computes gate and up, else None. wide: whether the result is float32."""
        self._env, self._n, self._k, self._gated, self.wide = env, n, k, gated, wide
        self._random = RandomTensors(env)
        count = min(16, 1 + (MIN_TOTAL_BYTES if env.cuda else 1) // (n * k * env.dtype.itemsize))
        self._copies = [self._random(n, k) for _ in range(count)]
        self._product: Product = "gated" if gated else "linear"
        self._columns = n // 2 if gated else n
        self.device = torch.cuda.get_device_name(env.device) if env.cuda else "cpu"
        self.name = product_name(self._product, tiles.format_name(env.dtype), self._columns, k)

    def sweep(self, rows: int) -> tuple[Tile, Row]:
        """Measures all tiles with `rows` rows. Returns the best tile, and a row of the results."""
        x = self._random(rows, self._k)
        choose = tiles.choose_gated_tile if self._gated else tiles.choose_tile
        chosen = choose(rows, self._columns, self._k, x.dtype, tiles.kind_of(x.device, plain=True))
        expected = self._multiply(x, self._copies[0], chosen)
        shape = tiles.shape_of(self._product, rows, self._columns, self._k, x.dtype)
        tried = [*dict.fromkeys((chosen, *candidates(self._product, shape)))][: None if self._env.cuda else CPU_TILES]
        seconds, problems = dict[Tile, float](), dict[Tile, str]()
        for tile in tried:
            try:
                if torch.equal(self._multiply(x, self._copies[0], tile), expected):
                    seconds[tile] = self._seconds(x, tile)
                else:
                    problems[tile] = "other bits"
            except Exception as error:  # for example a compiler error; the next tile may compile
                problems[tile] = type(error).__name__
        fastest = min(seconds, key=lambda tile: seconds[tile])
        best = fastest if seconds[chosen] > WORTH * seconds[fastest] else chosen
        figures: Row = {
            "used": described(chosen), "µs": 1e6 * seconds[chosen], "best": described(best),
            "µs best": 1e6 * seconds[best], "gain %": 100 * (seconds[chosen] / seconds[best] - 1), "tried": len(tried),
            "result": FAIL if "other bits" in problems.values() else PASS,
        }  # fmt: skip
        if self._env.cuda and rows >= FEWEST_ROWS and not self._gated:
            library = self._env.clock.seconds_on_device(lambda: self._library(x))
            figures["µs library"] = 1e6 * library / len(self._copies)
        if problems:
            figures["note"] = ", ".join(f"{described(tile)}: {problem}" for tile, problem in problems.items())
        return best, figures

    def _seconds(self, x: Tensor, tile: Tile) -> float:
        def run() -> None:
            for weight in self._copies:
                self._launch(x, weight, tile)

        return self._env.clock.seconds_on_device(run) / len(self._copies)

    def _library(self, x: Tensor) -> None:
        for weight in self._copies:
            cublas_linear(x, weight, None, fp32_out=self.wide, split_k=True)

    def _multiply(self, x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
        return sum_split_k(self._launch(x, weight, tile), 2, torch.float32 if self.wide else x.dtype)

    def _launch(self, x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
        if not x.is_cuda:  # the CPU has no tiles; this only tests the measurement itself
            packed = pack(weight, invariant=True)
            return gated_linear(x, packed, self._gated) if self._gated else linear(x, packed, fp32_out=self.wide)
        if self._gated:
            return gated_linear_triton(x, weight, None, self._gated, tile=tile)
        return linear_triton(x, weight, None, fp32_out=self.wide, split_k=not self.wide, tile=tile)


def described(tile: Tile) -> str:
    """Describes a tile in a few words, such as "128x64 w4 s4 split" (rows x columns, warps, stages, split of K)."""
    chains = "" if tile.chains == "auto" else f" {tile.chains}"
    return f"{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}{chains}"


def add_entries(path: Path, device: str, name: str, entries: list[list[Any]]) -> None:
    """Adds a product's entries to the table in a file. If the file is missing, starts from the worker's table."""
    table = json.loads(path.read_text()) if path.exists() else {key: dict(value) for key, value in MEASURED.items()}
    table.setdefault(device, {})[name] = entries
    path.write_text(as_json(table))


def as_json(table: dict[str, dict[str, list[list[Any]]]]) -> str:
    """Returns the table as JSON with a line for each entry."""

    def product(name: str, entries: list[list[Any]]) -> str:
        return (
            f"    {json.dumps(name)}: [\n" + ",\n".join(f"      {json.dumps(entry)}" for entry in entries) + "\n    ]"
        )

    def device(name: str, found: dict[str, list[list[Any]]]) -> str:
        return f"  {json.dumps(name)}: {{\n" + ",\n".join(product(*item) for item in found.items()) + "\n  }"

    return "{\n" + ",\n".join(device(*item) for item in table.items()) + "\n}\n"
