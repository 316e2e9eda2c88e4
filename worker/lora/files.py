"""Reads the matrices of an adapter's files, by the module names of PEFT, for both PEFT and GGUF files."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.gguf.config import ARCHITECTURES
from shared.gguf.index import Index
from shared.gguf.lora import read_gguf
from shared.lora import AdapterError, AdapterFiles, LowRank, StoredFactor, low_rank_modules
from worker.quantization.gguf_tensors import AS_STORED, PAIRED, Layout, hugging_face_name, layout_of
from worker.spec import ModelSpec

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
