"""Passes a step's LoRA adapters to the C library, which adds them to linears (worker/lora/csrc/adapters.c).

The structures have the same fields, in the same order, as the structs in worker/lora/csrc/adapters.h.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.linear.native import CpuWeight
from worker.ops.native import instruction_sets, kernels


@dataclass(frozen=True, slots=True)
class PartC:
    """The matrix B of modules whose outputs are consecutive columns of a linear.

    b: maps `ranks` inputs, padded with zeros, to the columns
    first_rank, ranks: which outputs of A are the inputs of b
    column: the first column of the linear that b changes
    """

    b: CpuWeight
    first_rank: int
    ranks: int
    column: int


@dataclass(frozen=True, slots=True)
class ProductC:
    """The product that an adapter adds to the linear `changed` [N, K].

    a: maps the K inputs of the linear to the ranks of all parts
    factors [N] float32: a factor for each column of the product
    """

    changed: CpuWeight
    a: CpuWeight
    parts: Sequence[PartC]
    factors: Tensor


KERNELS = ("add_product", "multiply_a", "add_b")  # the function pointers of struct StepAdapters, in its order


class _Part(Structure):
    _fields_ = [("b", c_void_p), *((name, c_long) for name in ("first_rank", "ranks", "column"))]


class _Product(Structure):
    _fields_ = [
        ("changed", c_void_p), ("a", c_void_p), ("parts", POINTER(_Part)), ("part_count", c_long),
        ("factors", c_void_p),
    ]  # fmt: skip


class _Rows(Structure):
    _fields_ = [
        ("products", POINTER(_Product)), ("product_count", c_long), ("rows", c_void_p), ("count", c_long),
        ("scale", c_float),
    ]  # fmt: skip


class _StepAdapters(Structure):
    _fields_ = [
        ("adapters", POINTER(_Rows)), ("count", c_long), *((name, c_void_p) for name in KERNELS), ("in_tiles", c_int),
    ]  # fmt: skip


class AdapterC:
    """The products of an adapter. They are sorted by the address of the changed linear, so that C can search them."""

    def __init__(self, products: Sequence[ProductC]) -> None:
        # kept because the structs hold only the addresses of the products' tensors
        self.products = sorted(products, key=lambda product: ctypes.addressof(product.changed.struct))
        self.dtype = products[0].changed.dtype
        self.structs = (_Product * len(products))(*map(_product, self.products))


def _product(product: ProductC) -> _Product:
    a, factors, changed = product.a, product.factors, product.changed
    assert len(a.parts) == 1 and a.k == changed.k and a.dtype == changed.dtype
    assert factors.shape == (changed.n,) and factors.dtype == torch.float32 and factors.is_contiguous()
    for part in product.parts:
        assert len(part.b.parts) == 1 and part.b.dtype == a.dtype and part.ranks <= part.b.k
        assert part.first_rank + part.ranks <= a.n and part.column + part.b.n <= changed.n
    parts = [_Part(ctypes.addressof(one.b.struct), one.first_rank, one.ranks, one.column) for one in product.parts]
    changed_at, a_at = ctypes.addressof(changed.struct), ctypes.addressof(a.struct)
    return _Product(changed_at, a_at, (_Part * len(parts))(*parts), len(parts), factors.data_ptr())


@dataclass(frozen=True, slots=True)
class RowsC:
    """The rows of a step that use an adapter with the same scale.

    of_all: the indices of these rows among all T rows of the step, int64, ascending
    of_logits: the indices of these rows among the R rows whose logits are computed, int64, ascending
    """

    adapter: AdapterC
    scale: float
    of_all: Tensor
    of_logits: Tensor


class StepAdaptersC:
    """The adapters of all rows of a step."""

    def __init__(self, rows: Sequence[RowsC]) -> None:
        self._rows = rows  # kept because the library gets the addresses of the tensors in `rows`
        dtype = rows[0].adapter.dtype
        functions, in_tiles = kernels()[dtype], instruction_sets(dtype)[1] == "amx"
        called = [ctypes.cast(getattr(functions, name), c_void_p) for name in KERNELS]
        columns = ([one.of_all for one in rows], [one.of_logits for one in rows])
        self._structs = (_StepAdapters * 2)(
            *(_StepAdapters(_rows(rows, each), len(rows), *called, in_tiles) for each in columns)
        )

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of two structs StepAdapters: for all rows, and for the rows with logits."""
        return ctypes.addressof(self._structs[0]), ctypes.addressof(self._structs[1])


def _rows(rows: Sequence[RowsC], columns: Sequence[Tensor]) -> "ctypes.Array[_Rows]":
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in columns)
    return (_Rows * len(rows))(
        *(
            _Rows(one.adapter.structs, len(one.adapter.structs), each.data_ptr(), len(each), one.scale)
            for one, each in zip(rows, columns, strict=True)
        )
    )
