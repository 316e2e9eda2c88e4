"""An adapter in memory: for each linear layer that it changes, the packed low-rank product A B.

A and B are packed like the weights of linear layers, so the bits of a row do not depend on other rows
(worker/ops/linear/packed.py). A linear layer in memory may consist of several modules of the checkpoint, such as
q_proj, k_proj and v_proj. They have the same input, so their matrices A are stacked. Each module changes its own output
columns, so it has its own matrix B. Modules with interleaved columns share one B, filled with zeros.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.lora import AdapterError, AdapterFiles
from worker.lora.files import Factors, StoredProduct, stored_products
from worker.lora.target_modules import Rows, Sites
from worker.ops.linear import linear
from worker.ops.linear.lora_native import AdapterC, PartC, ProductC
from worker.ops.linear.native import CpuWeight
from worker.ops.linear.packed import PackedLinear, pack
from worker.ops.moe.packed import PackedExperts
from worker.ops.native import Memory, Pieces

NOT_OF_TEXT = ("vision", "visual", "audio")  # words in the names of encoders' modules, which adapters cannot change
IN_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")
Gather = Callable[[Tensor], Tensor]  # returns the columns of all ranks [T, N] for those of one of them
RANK_STEP = 32  # the input of B is padded with zeros to a multiple of this, because kernels need it


@dataclass(frozen=True, slots=True)
class ProductPart:
    """The matrix B of one module, or of modules with interleaved columns.

    b: padded ranks → columns. B reads `ranks` outputs of A from `first_rank` on, and changes `columns` columns of the
    layer's output from `column` on.
    """

    b: PackedLinear
    first_rank: int
    ranks: int
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class Product:
    """The term that an adapter adds to the output of a linear layer: scale * factors * (x A B), computed row by row."""

    a: PackedLinear  # inputs → ranks of all parts
    parts: tuple[ProductPart, ...]
    factors: Tensor  # [outputs] float32
    table: Tensor | None = None  # addresses and sizes of A and B for GPU kernels (lora/triton.py); None on the CPU

    @property
    def ranks(self) -> int:
        """The number of outputs of A."""
        return max(part.first_rank + part.ranks for part in self.parts)

    def add(self, y: Tensor, rows: Tensor, x: Tensor, scale: float, multiply: Callable[..., Tensor] = linear) -> None:
        """Adds the product of x [R, K] to the rows `rows` [R] of y [T, N]. Sums are in float32 and rounded once."""
        low = multiply(x, self.a)
        for part in self.parts:
            ranks = low[:, part.first_rank : part.first_rank + part.ranks]
            padded = torch.nn.functional.pad(ranks, (0, -part.ranks % RANK_STEP)).contiguous()
            at = slice(part.column, part.column + part.columns)
            added = multiply(padded, part.b, fp32_out=True) * self.factors[at] * scale
            y[rows, at] = (y[rows, at].float() + added).to(y.dtype)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """An adapter with packed matrices.

    products: id() of a PackedLinear → the product that changes it
    of_experts: id() of the PackedExperts → number of the expert → product
    in_c: all products for the C library; None if the library cannot compute them, or if experts are changed
    number: the name of the adapter between several processes that compute a model together (worker/distributed/lora.py)
    """

    sha256: str
    products: Mapping[int, Product]
    of_experts: Mapping[int, Mapping[int, Product]]
    in_c: AdapterC | None
    number: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it changes no layer of this process."""
        return not self.products and not self.of_experts


def load_adapter(
    files: AdapterFiles, sites: Sites, dtype: torch.dtype, device: torch.device, max_rank: int
) -> LoadedAdapter:
    """Packs an adapter for a model with these sites. Raises AdapterError.

    Linears of other processes are not packed, but their matrices are checked, so that an adapter is refused by all
    processes or by none.
    """
    stored_factors = Factors(files)
    changed: defaultdict[tuple[int, int | None], list[tuple[Rows, StoredProduct]]] = defaultdict(list)
    seen: dict[tuple[Rows, ...], str] = {}
    for module, stored in stored_products(files, sites.spec, max_rank).items():
        found = _sites_of(module, sites)
        if (other := seen.setdefault(found, module)) is not module:
            raise AdapterError(f"the adapter has the same module twice: as {other} and as {module}")
        for rows in found:
            _check_shape(module, stored, rows)
            if rows.linear is None:
                stored.check(stored_factors)
            else:
                changed[id(rows.linear), rows.expert].append((rows, stored))
    memory = Pieces().take  # large memory pages for many small matrices, because 4 KB pages would cause TLB misses
    packed = {key: _product(stored_factors, pairs, dtype, device, memory) for key, pairs in changed.items()}
    products = {key: product for (key, expert), product in packed.items() if expert is None}
    of_experts: defaultdict[int, dict[int, Product]] = defaultdict(dict)
    for (key, expert), product in packed.items():
        if expert is not None:
            of_experts[key][expert] = product
    linears = [(one, packed[key]) for key, pairs in changed.items() if (one := pairs[0][0].linear) is not None]
    return LoadedAdapter(files.sha256, products, of_experts, _in_c(linears))


def _sites_of(module: str, sites: Sites) -> tuple[Rows, ...]:
    matched = None if any(word in module for word in NOT_OF_TEXT) else IN_LAYER.fullmatch(module)
    found = None if matched is None else sites.rows.get((int(matched[1]), matched[2]))
    if found is None:
        raise AdapterError(f"the adapter changes {module}, which the base model lacks or which adapters cannot change")
    return found


def _check_shape(module: str, product: StoredProduct, rows: Rows) -> None:
    shape, wanted = product.shape, (len(rows.places), rows.inputs)
    if shape != wanted:
        raise AdapterError(
            f"{module}: the adapter is for a weight of {shape[0]} x {shape[1]}, "
            f"but the base model's is {wanted[0]} x {wanted[1]}"
        )


def _product(
    stored_factors: Factors,
    pairs: Sequence[tuple[Rows, StoredProduct]],
    dtype: torch.dtype,
    device: torch.device,
    memory: Memory,
) -> Product:
    first = pairs[0][0]
    factors, stacked, at = torch.ones(first.outputs), list[Tensor](), 0
    stored_parts = list[tuple[Tensor, int, int, int]]()  # (B, first rank, number of ranks, first column)
    for group in _apart(pairs):
        ranks, (begin, end) = sum(stored.low.rank for _, stored in group), _columns(group)
        b, own = torch.zeros(end - begin, -(-ranks // RANK_STEP) * RANK_STEP), 0
        for rows, stored in group:
            rank = stored.low.rank
            inside = rows.places >= 0
            places = rows.places[inside]
            stacked.append(stored.a(stored_factors))
            b[places - begin, own : own + rank] = stored.b(stored_factors)[inside]
            factors[places] = stored.low.scale
            own += rank
        stored_parts.append((b, at, ranks, begin))
        at += ranks
    a = _packed(torch.cat(stacked), dtype, device, memory)  # packed before B, because steps read A first
    parts = tuple(
        ProductPart(_packed(b, dtype, device, memory), first_rank, ranks, column, len(b))
        for b, first_rank, ranks, column in stored_parts
    )
    factors = factors.to(device)
    return Product(a, parts, factors, _table(a, factors, parts, device))


def _table(a: PackedLinear, factors: Tensor, parts: Sequence[ProductPart], device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return None
    from worker.lora.triton import part_table

    return part_table(a.weight, factors, [(one.b.weight, one.first_rank, one.ranks, one.column) for one in parts])


def _apart(pairs: Sequence[tuple[Rows, StoredProduct]]) -> list[list[tuple[Rows, StoredProduct]]]:
    """Groups modules with interleaved columns, so that the column ranges of different groups do not overlap."""
    groups: list[list[tuple[Rows, StoredProduct]]] = []
    for pair in sorted(pairs, key=lambda pair: _columns([pair])):
        if groups and _columns([pair])[0] < _columns(groups[-1])[1]:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return groups


def _columns(group: Sequence[tuple[Rows, StoredProduct]]) -> tuple[int, int]:
    """Returns the first column that a group changes, and the end of its columns."""
    places = torch.cat([rows.places for rows, _ in group])
    return int(places[places >= 0].min()), int(places.max()) + 1


def _packed(matrix: Tensor, dtype: torch.dtype, device: torch.device, memory: Memory) -> PackedLinear:
    return pack(matrix.to(dtype).to(device), invariant=True, memory=memory)


def _in_c(products: Sequence[tuple[PackedLinear | PackedExperts, Product]]) -> AdapterC | None:
    found = list[ProductC]()
    for changed, product in products:
        a, b = product.a.cpu, [part.b.cpu for part in product.parts]
        parts = [
            PartC(one, part.first_rank, part.ranks, part.column)
            for one, part in zip(b, product.parts, strict=True)
            if one is not None
        ]
        if not isinstance(changed.cpu, CpuWeight) or a is None or len(parts) < len(b):
            return None
        found.append(ProductC(changed.cpu, a, parts, product.factors))
    return AdapterC(found) if found else None
