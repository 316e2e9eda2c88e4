"""Reads rows of an embedding in a block format, or from a packed head, with the C library (csrc/embedding.c)."""

from ctypes import byref, c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor

from worker.ops.block_rows import BlockFormat, BlockRows
from worker.ops.linear.native import CpuWeight, order_of_codes
from worker.ops.native import address, library
from worker.ops.quantized_weight import INT4, INT8, CodeMap


def rows(table: BlockRows, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Computes the same as `rows_torch`, for float32 and bfloat16. out: contiguous memory for the rows [T, H]

    Raises IndexError if an id is not in [0, N).
    """
    found, (n, hidden), format = library(), table.shape, table.format
    assert found is not None and table.stored.is_contiguous()
    ids, out = _checked(ids, out, hidden, dtype)
    wrong = found.block_rows(
        *_meaning(format), c_void_p(table.stored.data_ptr()), c_long(n), c_long(hidden // format.numbers),
        *_rows_to(ids, out),
    )  # fmt: skip
    return _unless(wrong, out, n)


def packed_rows(
    packed: CpuWeight, scales: Tensor, format: BlockFormat, ids: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Reads rows [T, H] of a table whose codes are in a weight of one part, packed for inputs of `dtype`.

    scales: the bytes of each block that hold its scales (BlockFormat.scales), uint8 [N, blocks * bytes]. ids, out: as
    for `rows`. Raises IndexError if an id is not in [0, N).
    """
    found, where = library(), format.scales
    assert found is not None and where is not None and scales.is_contiguous()
    ids, out = _checked(ids, out, packed.k, dtype)
    order, flip = order_of_codes(packed, format.code_map)
    wrong = found.packed_rows(
        *_meaning(format), byref(packed.struct), c_int(order), c_int(flip), c_void_p(scales.data_ptr()),
        c_int(where.start), c_int(where.stop - where.start), *_rows_to(ids, out),
    )  # fmt: skip
    return _unless(wrong, out, packed.n)


def _checked(ids: Tensor, out: Tensor | None, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ids = ids.contiguous()
    out = torch.empty(len(ids), hidden, dtype=dtype) if out is None else out
    assert ids.dtype == torch.int64 and ids.ndim == 1 and dtype in (torch.float32, torch.bfloat16)
    assert out.is_contiguous() and out.shape == (ids.shape[0], hidden) and out.dtype == dtype
    return ids, out


def _meaning(format: BlockFormat) -> tuple[c_int, c_void_p, c_void_p, c_int]:
    """Returns the first arguments of both functions in C: what the codes of a block mean."""
    return *format.in_c, c_void_p(address(_values(format.code_map))), c_int(format.code_map.bits)


def _rows_to(ids: Tensor, out: Tensor) -> tuple[c_void_p, c_long, c_void_p, c_int, c_int]:
    """Returns the last arguments of both functions in C: which rows are written, and where."""
    in_bf16, threads = c_int(out.dtype == torch.bfloat16), c_int(torch.get_num_threads())
    return c_void_p(ids.data_ptr()), c_long(ids.shape[0]), c_void_p(out.data_ptr()), in_bf16, threads


def _unless(wrong: int, out: Tensor, n: int) -> Tensor:
    if wrong:
        raise IndexError(f"the ids of rows of an embedding must be at least 0 and less than {n}")
    return out


def _values(code_map: CodeMap) -> Tensor | None:
    """Returns the number of each code, float32; None if the codes are signed integers, which need no table."""
    return None if code_map in (INT4, INT8) else _table(code_map)


@cache
def _table(code_map: CodeMap) -> Tensor:
    return torch.tensor(code_map.values)
