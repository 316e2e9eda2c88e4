"""Adapters in captured steps: the same kernels as in other steps, with all that differs from step to step in memory at
fixed addresses.

A pair of an adapter and a scale has a slot. For each linear layer, a table has the addresses of the matrices of each
slot (part_table in lora/triton.py). A step sends which rows have which slot, in tiles. A captured step has as many
tiles as its rows can need; those that are left name a slot without matrices, whose programs end at once.

Captured steps add products to those linears that an adapter of a step so far has changed, for as many modules and ranks
as such adapters had. An adapter that needs more begins a new generation of tables, and all steps with adapters are
captured again.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.lora.loaded import LoadedAdapter, Product
from worker.lora.triton import PART_FIELDS, ROW_FIELDS, TILE_ROWS, AdapterTiles, launch_products
from worker.model_runner.cuda_graph_inputs import Blocks, Columns, Shape, Shapes, block_bytes, views_of
from worker.model_runner.inputs import BatchMetadata, to_device
from worker.model_runner.runner import operations_of
from worker.models.forward_inputs import ForwardInputs, Model
from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
from worker.scheduler.sequence import Chunk
from worker.spec import Activation

NO_SLOT = -1  # of a chunk without an adapter
Key = tuple[int, float]  # id() of a LoadedAdapter, and its scale
Compute = Callable[[Model, ForwardInputs], Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """How many parts a linear's products have (see part_table), and how many rows A has, at most."""

    parts: int
    ranks: int

    def holds(self, product: Product) -> bool:
        return product.table is not None and len(product.table) <= self.parts and product.ranks <= self.ranks

    def grown(self, product: Product) -> "Size":
        return Size(max(self.parts, len(product.parts)), max(self.ranks, product.ranks))


@dataclass(frozen=True, slots=True)
class Table:
    """The products of one linear. fields [(slots + 1) * parts, PART_FIELDS] int64: the part_table of each slot"""

    size: Size
    fields: Tensor


class Tables:
    """The tables of one generation, in one tensor. The last slot, `nothing`, never has matrices."""

    def __init__(self, sizes: Mapping[int, Size], slots: int, device: torch.device) -> None:
        self.nothing, self._slots, self._device = slots, slots, device
        self._sizes = dict(sizes)
        counts = [size.parts for size in self._sizes.values()]
        self._parts = np.array(counts, np.int64)
        self._firsts = (np.cumsum(self._parts) - self._parts) * (slots + 1)
        self._fields = torch.zeros(sum(counts) * (slots + 1), PART_FIELDS, dtype=torch.int64, device=device)
        self._none = torch.zeros(max(counts), PART_FIELDS, dtype=torch.int64, device=device)
        self.scales = torch.zeros(slots + 1, device=device)  # float32
        own = self._fields.split_with_sizes([count * (slots + 1) for count in counts])
        # id() of a PackedLinear → its table
        self.of_linears = {key: Table(size, part) for (key, size), part in zip(self._sizes.items(), own, strict=True)}

    def hold(self, adapter: LoadedAdapter) -> bool:
        """Whether the tables have room for all products of an adapter."""
        return all(key in self._sizes and self._sizes[key].holds(product) for key, product in adapter.products.items())

    def put(self, slot: int, adapter: LoadedAdapter, scale: float) -> None:
        """Puts an adapter into a slot, for all steps that are launched later in the stream."""
        rows, given = list[NDArray[np.int64]](), list[Tensor]()
        for key, parts, first in zip(self._sizes, self._parts, self._firsts, strict=True):
            table = None if (product := adapter.products.get(key)) is None else product.table
            rows.append(first + slot * parts + np.arange(parts))
            given += [self._none[:parts]] if table is None else [table, self._none[: parts - len(table)]]
        self._fields.index_copy_(0, to_device(np.concatenate(rows), self._device), torch.cat(given))
        self.scales[slot].fill_(scale)


class GraphAdapters:
    """The adapters of captured steps: at most `slots` pairs of an adapter and a scale in a step.

    generation: grows when all steps with adapters must be captured again
    """

    def __init__(self, model: Model, cache: KVCache, shapes: Shapes, slots: int, compute: Compute) -> None:
        """compute: computes the logits of a captured step"""
        self.generation = 0
        self._model, self._cache, self._slots, self._compute = model, cache, slots, compute
        self._blocks = Blocks(
            max(block_bytes(_layout(shape, slots)) for shape in shapes.all_shapes() if _can_have_adapters(shape)),
            cache.device,
        )
        self._sizes: dict[int, Size] = {}  # id() of a PackedLinear → its size; those of earlier adapters are kept
        self._tables: Tables | None = None
        self._held: dict[Key, tuple[int, weakref.ref[LoadedAdapter]]] = {}  # in order of use, the latest last

    def place(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """Returns the slot of each chunk, or NO_SLOT. Sends the tables of adapters that have no slot yet.

        Returns None if the step must run without a graph: it has more pairs than slots, or an adapter that changes
        experts.
        """
        uses = [chunk.sequence.adapter for chunk in chunks]
        keys: list[Key | None] = [None if use is None else (id(use.loaded), use.adapter.scale) for use in uses]
        wanted: dict[Key, LoadedAdapter] = {
            key: use.loaded for key, use in zip(keys, uses, strict=True) if key is not None and use is not None
        }
        if len(wanted) > self._slots or not all(map(_can_be_captured, wanted.values())):
            return None
        if self._tables is None or not all(map(self._tables.hold, wanted.values())):
            self._grow(wanted.values())
        slots = {key: self._slot(key, adapter, wanted) for key, adapter in wanted.items()}
        return [NO_SLOT if key is None else slots[key] for key in keys]

    def _grow(self, adapters: Any) -> None:
        """Makes larger tables. Waits for the device, which may still read the tables and graphs of before."""
        for adapter in adapters:
            for key, product in adapter.products.items():
                self._sizes[key] = self._sizes.get(key, Size(0, 0)).grown(product)
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize()
        self._tables = Tables(self._sizes, self._slots, self._cache.device)
        self._held = {}
        self.generation += 1

    def _slot(self, key: Key, adapter: LoadedAdapter, wanted: Mapping[Key, LoadedAdapter]) -> int:
        held = self._held.pop(key, None)
        if held is None or held[1]() is not adapter:  # an id() may be that of another adapter, which is gone
            slot = self._free(wanted) if held is None else held[0]
            assert self._tables is not None
            self._tables.put(slot, adapter, key[1])
            held = slot, weakref.ref(adapter)
        self._held[key] = held
        return held[0]

    def _free(self, wanted: Mapping[Key, LoadedAdapter]) -> int:
        taken = {slot for slot, _ in self._held.values()}
        if len(taken) < self._slots:
            return next(slot for slot in range(self._slots) if slot not in taken)
        oldest = next(key for key in self._held if key not in wanted)
        return self._held.pop(oldest)[0]

    def step(self, shape: Shape) -> "StepAdapters":
        """Returns the adapters of the captured step of a shape, for this generation."""
        assert self._tables is not None
        return StepAdapters(shape, self._tables, self._blocks, self._slots, self._model, self._compute)

    def eager(self, chunks: Sequence[Chunk], inputs: ForwardInputs) -> Tensor:
        """Returns the logits of a step without a graph, [R, vocab] float32."""
        operations = operations_of(self._model.operations, chunks, inputs)
        return self._model.with_operations(operations).forward(inputs, self._cache)


class StepAdapters:
    """The adapters of the captured step of one shape."""

    def __init__(
        self, shape: Shape, tables: Tables, blocks: Blocks, slots: int, model: Model, compute: Compute
    ) -> None:
        self._shape, self._tables, self._blocks, self._compute = shape, tables, blocks, compute
        self._nbytes = block_bytes(_layout(shape, slots))
        self._host = [
            {name: view.numpy() for name, view in views_of(block, _layout(shape, slots))} for block in blocks.on_host
        ]
        sent = dict(views_of(blocks.on_device, _layout(shape, slots)))
        of_all, of_logits = [
            AdapterTiles(sent[f"order of {rows}"], sent[f"tiles of {rows}"].view(-1, ROW_FIELDS), tables.scales)
            for rows in ("all", "logits")
        ]
        self._model = model.with_operations(
            operations_in_graph(model.operations, tables.of_linears, {shape.rows: of_logits, shape.tokens: of_all})
        )

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the logits of the shape, [R, vocab] float32. Never waits for the device."""
        return self._compute(self._model, inputs)

    def fill(self, layout: BatchMetadata, slots: Sequence[int]) -> None:
        """Sends which rows have which slot. slots: for each chunk, see GraphAdapters.place"""
        columns = self._host[self._blocks.next()]
        of_rows = np.array(slots, np.int64)[layout.chunk_of_row]
        for name, of_each in (("all", of_rows), ("logits", of_rows[layout.logits_indices])):
            order, tiles = tiles_of_slots(of_each)
            columns[f"order of {name}"][: len(order)] = order
            into = columns[f"tiles of {name}"].reshape(-1, ROW_FIELDS)
            into[: len(tiles)] = tiles
            into[len(tiles) :] = self._tables.nothing, 0, 0
        self._blocks.send(self._nbytes)


def tiles_of_slots(slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the rows that have a slot, ordered by slot, [S] int64, and their tiles [n, ROW_FIELDS] int32.

    slots [T]: the slot of each row, or NO_SLOT
    """
    rows = np.flatnonzero(slots != NO_SLOT)
    order = rows[np.argsort(slots[rows], kind="stable")]
    found, counts = np.unique(slots[order], return_counts=True)
    tiles, first = list[tuple[int, int, int]](), 0
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        tiles += [(slot, first + at, min(TILE_ROWS, count - at)) for at in range(0, count, TILE_ROWS)]
        first += count
    return order, np.array(tiles, np.int32).reshape(-1, ROW_FIELDS)


def _layout(shape: Shape, slots: int) -> Columns:
    for name, rows in (("all", shape.tokens), ("logits", shape.rows)):
        yield f"order of {name}", torch.int64, rows
        # each slot has at most one tile that is not full
        yield f"tiles of {name}", torch.int32, ROW_FIELDS * min(rows, rows // TILE_ROWS + slots)


def _can_have_adapters(shape: Shape) -> bool:
    """Whether the number of a tensor's rows tells whether they are the rows with logits."""
    return not shape.mixed or shape.rows < shape.tokens


def _can_be_captured(adapter: LoadedAdapter) -> bool:
    """Whether kernels add all products of an adapter; experts with adapters are computed one by one."""
    return not adapter.of_experts and all(product.table is not None for product in adapter.products.values())


@dataclass(frozen=True, slots=True)
class OperationsInGraph(Operations):
    """The operations of a captured step with adapters. changed: id() of the PackedLinears that get products."""

    plain: Operations
    changed: Mapping[int, Table]

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        if id(packed) not in self.changed:
            return self.plain.linear_add_norm(x, packed, residual, weight, eps, **how)
        return self.plain.add_rms_norm(self.linear(x, packed), residual, weight, eps, **how)


def operations_in_graph(
    plain: Operations, tables: Mapping[int, Table], tiles: Mapping[int, AdapterTiles]
) -> OperationsInGraph:
    """Returns the operations of a captured step with adapters.

    tables: id() of a PackedLinear → its products. tiles: number of rows of an input → the tiles of these rows.

    A gated linear that may have products is computed as a linear and its activation, for all rows: the kernel that
    computes both together gives the same bits.
    """

    def linear(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
        table = tables.get(id(packed))
        if table is None:
            return plain.linear(x, packed, fp32_out=fp32_out, split_k=split_k)
        y = plain.linear(x, packed, fp32_out=fp32_out)
        launch_products(y, x, tiles[len(x)], table.fields, table.size.parts, table.size.ranks)
        return y

    def gated_linear(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
        if id(packed) not in tables:
            return plain.gated_linear(x, packed, activation)
        return plain.act_and_mul(linear(x, packed), activation)

    bound = {item.name: getattr(plain, item.name) for item in fields(Operations)}
    return OperationsInGraph(**bound | {"linear": linear, "gated_linear": gated_linear}, plain=plain, changed=tables)
