"""The matrices of an adapter's files, by the names that PEFT gives their modules, whichever form the files have."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.adapters.files import AdapterError, AdapterFiles
from shared.adapters.low_rank import LowRank, StoredFactor, low_rank_modules
from worker.model.gguf.layout import AS_STORED, Layout
from worker.spec import ModelSpec

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q8_0_BYTES = 34  # of a block: a scale in float16 and 32 numbers in int8


@dataclass(frozen=True, slots=True)
class StoredProduct:
    """The product of a module. order: how the file has the rows of B and the columns of A"""

    low: LowRank
    order: Layout = AS_STORED

    def a(self, files: AdapterFiles) -> Tensor:
        """Returns [rank, inputs] float32. Raises AdapterError."""
        values = _read(files, self.low.a)
        return values if self.order.columns is None else values[:, self.order.columns]

    def b(self, files: AdapterFiles) -> Tensor:
        """Returns [outputs, rank] float32. Raises AdapterError."""
        values = _read(files, self.low.b)
        return values if self.order.rows is None else values[self.order.rows]


def stored_products(files: AdapterFiles, spec: ModelSpec, max_rank: int) -> Mapping[str, StoredProduct]:
    """Returns the products of an adapter by the names of their modules. Raises AdapterError."""
    if not files.is_gguf:
        return {module: StoredProduct(low) for module, low in low_rank_modules(files, max_rank).items()}
    from worker.adapters.from_gguf import products_of_gguf

    return products_of_gguf(files, spec, max_rank)


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
