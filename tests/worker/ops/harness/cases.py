"""Inputs and comparisons that the kernel tests share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

TRITON_DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(device=device, dtype=dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """Asserts that values differ only by rounding in fp32: at most by the dtype's tolerance times the largest value."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    bound = TOLERANCE[got.dtype] * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=bound)


def near(got: Tensor, exact: Tensor) -> None:
    """Asserts that the norm of the error is below 1e-3 (bfloat16: 1e-2) of the norm of `exact`."""
    error = float((got.double() - exact.double()).norm() / exact.double().norm())
    assert got.shape == exact.shape and error < (1e-2 if got.dtype == torch.bfloat16 else 1e-3)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new tensors with NaN, so that reading an unwritten element shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Batch:
    """Sequences (q_len, seq_len) over a shuffled page pool, whose unused slots hold NaN."""

    q: Tensor
    cache_k: Tensor
    cache_v: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    page_table: Tensor
    keys: tuple[Tensor, ...]  # each sequence's keys [seq_len, Hk, D], in order
    values: tuple[Tensor, ...]
    max_kv_len: int

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.query_start_loc, self.seq_lens, self.page_table, self.max_kv_len

    def to(self, device: str) -> "Batch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(**(vars(self) | moved))


def batch(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    keys = tuple(random(kv, kv_heads, size, dtype=dtype, seed=seed + 10 * i) for i, (_, kv) in enumerate(lengths))
    values = tuple(random(kv, kv_heads, size, dtype=dtype, seed=seed + 10 * i + 5) for i, (_, kv) in enumerate(lengths))
    rows = [random(q, heads, size, dtype=dtype, seed=seed + 10 * i + 7) for i, (q, _) in enumerate(lengths)]
    needed = [-(-kv // page_size) for _, kv in lengths]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)) + 1).split_with_sizes(needed)
    cache_k, cache_v = (torch.full((sum(needed) + 1, page_size, kv_heads, size), torch.nan, dtype=dtype) for _ in "kv")
    page_table = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
    for i, (_, kv) in enumerate(lengths):
        page_table[i, : needed[i]] = order[i]
        slots = (order[i][:, None] * page_size + torch.arange(page_size)).flatten()[:kv]
        cache_k.flatten(0, 1)[slots] = keys[i]
        cache_v.flatten(0, 1)[slots] = values[i]
    query_start_loc = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    return Batch(
        torch.cat(rows), cache_k, cache_v, query_start_loc,
        torch.tensor([kv for _, kv in lengths], dtype=torch.int32), page_table,
        keys, values, max(kv for _, kv in lengths),
    )  # fmt: skip


def rope_tables(length: int, size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length).float(), 100.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
    return angles.cos().to(device), angles.sin().to(device)
