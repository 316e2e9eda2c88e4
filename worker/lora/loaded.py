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

from shared.gguf.config import ARCHITECTURES
from shared.gguf.index import Index
from shared.gguf.lora import read_gguf
from shared.lora import AdapterError, AdapterFiles, LowRank, StoredFactor, low_rank_modules
from worker.lora.target_modules import Rows, Sites
from worker.ops.linear import linear
from worker.ops.linear.lora_native import AdapterC, PartC, ProductC
from worker.ops.linear.native import CpuWeight
from worker.ops.linear.packed import PackedLinear, pack
from worker.ops.moe.packed import PackedExperts
from worker.ops.native import Memory, Pieces
from worker.quantization.gguf_tensors import AS_STORED, PAIRED, Layout, hugging_face_name, layout_of
from worker.spec import ModelSpec

# Reads the matrices of an adapter's files, by the module names of PEFT, for both PEFT and GGUF files.

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q8_0_BYTES = 34  # bytes of a Q8_0 block: a scale in float16 and 32 numbers in int8


class Factors:
    """Reads matrices of an adapter's files. Caches the last two, because many experts may share one stored matrix."""

    def __init__(self, files: AdapterFiles) -> None:
        self._files, self._last = files, dict[StoredFactor, Tensor]()

    def read(self, factor: StoredFactor) -> Tensor:
        """Returns a matrix as float32. Raises AdapterError."""
        if (last := self._last.get(factor)) is not None:
            return last
        if len(self._last) > 1:
            self._last.clear()
        found = self._last[factor] = _read(self._files, factor)
        return found


@dataclass(frozen=True, slots=True)
class StoredProduct:
    """The low-rank product of a module. order: the order of B's rows and A's columns in the file. expert: the number of
    the expert, if the file stores all experts together."""

    low: LowRank
    order: Layout = AS_STORED
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [outputs, inputs] of the weight that the product changes."""
        return self.low.b.shape[0], self.low.a.shape[1]

    def check(self, factors: Factors) -> None:
        """Reads both matrices. Raises AdapterError if one cannot be used."""
        for factor in (self.low.a, self.low.b):
            factors.read(factor)

    def a(self, factors: Factors) -> Tensor:
        """Returns the matrix A, [rank, inputs] float32. Raises AdapterError."""
        values = factors.read(self.low.a)
        if self.expert is not None:
            return values.view(self.low.experts, self.low.rank, -1)[self.expert]
        return values if self.order.columns is None else values[:, self.order.columns]

    def b(self, factors: Factors) -> Tensor:
        """Returns the matrix B, [outputs, rank] float32. Raises AdapterError."""
        values = factors.read(self.low.b)
        if self.expert is not None:
            return values.view(len(values), self.low.rank, -1)[:, :, self.expert]
        return values if self.order.rows is None else values[self.order.rows]


def stored_products(files: AdapterFiles, spec: ModelSpec, max_rank: int) -> Mapping[str, StoredProduct]:
    """Returns the products of an adapter by module name. Raises AdapterError."""
    if not files.is_gguf:
        found = dict[str, StoredProduct]()
        for module, low in low_rank_modules(files, max_rank).items():
            found |= _of_experts(module, low, spec) if low.experts else {module: StoredProduct(low)}
        return found

    return products_of_gguf(files, spec, max_rank)


def _of_experts(module: str, low: LowRank, spec: ModelSpec) -> dict[str, StoredProduct]:
    """Returns the product of each expert, by the module name that its linear has if experts are stored separately."""
    count = 0 if spec.experts is None else spec.experts.count
    if low.experts != count:
        raise AdapterError(f"{module}: the adapter has products of {low.experts} experts, the base model has {count}")
    experts, _, linear = module.rpartition(".")
    return {f"{experts}.{number}.{linear}": StoredProduct(low, expert=number) for number in range(low.experts)}


def _read(files: AdapterFiles, factor: StoredFactor) -> Tensor:
    content = bytearray(memoryview(files.weights)[factor.begin : factor.end])
    if factor.dtype == "Q8_0":
        blocks = torch.frombuffer(content, dtype=torch.uint8).view(-1, Q8_0_BYTES)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        values = (blocks[:, 2:].contiguous().view(torch.int8).float() * scales).view(factor.shape)
    else:
        values = torch.frombuffer(content, dtype=DTYPES[factor.dtype]).view(factor.shape).float()
    if not values.isfinite().all():
        raise AdapterError("the adapter has numbers that are not finite")
    return values


# Reads the low-rank products of a GGUF adapter, and renames them to the module names of PEFT.
#
# Where llama.cpp's converter reorders the rows of a weight, the rows of the adapter's matrix B are in the same order
# (worker/quantization/gguf_tensors.py).

# model family → architectures of other families that its GGUF files may state
CONVERTED_AS = {"mistral": ("llama",), "mixtral": ("llama",), "ministral3": ("mistral3",)}
TILED = ("qwen35", "qwen35moe")  # architectures whose recurrent layers the converter reorders by heads


def products_of_gguf(files: AdapterFiles, spec: ModelSpec, max_rank: int) -> Mapping[str, StoredProduct]:
    """Returns the products of a GGUF adapter by module name. Raises AdapterError."""
    adapter = read_gguf(files, max_rank)
    architecture = adapter.architecture
    row = ARCHITECTURES.get(architecture)
    if (row is None or row.model_type != spec.model_type) and architecture not in CONVERTED_AS.get(spec.model_type, ()):
        raise AdapterError(
            f"the adapter is for a model of the architecture {architecture[:80]!r}, the base model is {spec.model_type}"
        )
    index, found = Index(architecture, spec.head_dim, spec.kv_heads, (), {}), dict[str, StoredProduct]()
    for stored, low in adapter.products.items():
        name = hugging_face_name(f"{stored}.weight", architecture)
        if architecture in TILED and ".linear_attn." in name:
            raise AdapterError(f"{stored}: GGUF adapters of recurrent layers of {architecture} are not supported")
        rows = low.b.shape[0]
        if PAIRED.fullmatch(name) and rows % spec.head_dim:
            raise AdapterError(f"{stored}: the adapter has {rows} outputs, not whole heads of {spec.head_dim}")
        order = layout_of(name, rows, index) if PAIRED.fullmatch(name) else AS_STORED
        found[name.removesuffix(".weight")] = StoredProduct(low, order)
    return found


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
