"""The interpreter adds in one fixed order: no row of a dot or of a sum depends on other rows, and no BLAS is called."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.interpreter import NOT_OURS, STEP, dot

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter")


@triton.jit
def _multiply_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a, b = tl.load(a_ptr + m[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.zeros((M, N), tl.int32 if a.dtype == tl.int8 else tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype))


@triton.jit
def _sum_kernel(x_ptr, rows_ptr, columns_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(rows_ptr + m, tl.sum(x, axis=1))
    tl.store(columns_ptr + n, tl.sum(x, axis=0))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(len(a), b.shape[1], dtype=torch.int32 if a.dtype is torch.int8 else torch.float32)
    _multiply_kernel[(1,)](a.contiguous(), b.contiguous(), out, *out.shape, a.shape[1])
    return out


def sums(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = torch.empty(len(x), dtype=x.dtype), torch.empty(x.shape[1], dtype=x.dtype)
    _sum_kernel[(1,)](x.contiguous(), rows, columns, *x.shape)
    return rows, columns


def parts_of(draw: Random, length: int) -> slice:
    """Draws a part of a side: a power of two, as the sides of tiles are."""
    size = 1 << draw.randrange(length.bit_length())
    first = draw.randrange(0, length, size)
    return slice(first, first + size)


def operand(draw: Random, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def test_no_row_or_column_of_a_dot_depends_on_company() -> None:
    """In 300 random shapes, a part of a product has the bits that it has in the whole, also transposed."""
    draw = Random(0)
    for _ in range(300):
        m, n, k = 1 << draw.randrange(8), 1 << draw.randrange(8), 1 << draw.randrange(4, 8)
        dtype = draw.choice([torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8])
        a, b = operand(draw, m, k, dtype=dtype), operand(draw, k, n, dtype=dtype)
        rows, columns = parts_of(draw, m), parts_of(draw, n)
        whole = multiply(a, b)
        assert torch.equal(multiply(a[rows], b[:, columns]), whole[rows, columns]), (m, n, k, dtype)
        assert torch.equal(multiply(b.T, a.T), whole.T), (m, n, k, dtype)


def test_steps_of_a_dot_are_added_one_after_another() -> None:
    """So a tile that advances along K by more numbers gives the same bits."""
    a, b = (operand(Random(seed), *shape, dtype=torch.float32).numpy() for seed, shape in enumerate([(3, 96), (96, 5)]))
    total = np.zeros((3, 5), np.float32)
    for k in range(0, 96, STEP):
        total = dot(a[:, k : k + STEP], b[k : k + STEP], total)
    assert np.array_equal(dot(a, b, np.zeros((3, 5), np.float32)), total)
    assert np.abs(total - a.astype(np.float64) @ b.astype(np.float64)).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_dot_of_every_type_is_right(dtype: torch.dtype) -> None:
    a, b = operand(Random(0), 16, 64, dtype=dtype), operand(Random(1), 64, 32, dtype=dtype)
    exact = a.double() @ b.double()
    assert (multiply(a, b).double() - exact).abs().max() <= (0 if dtype is torch.int8 else 1e-6 * exact.abs().max())


def test_no_row_or_column_of_a_sum_depends_on_company() -> None:
    draw = Random(0)
    for _ in range(100):
        m, n = 1 << draw.randrange(8), 1 << draw.randrange(10)
        x = operand(draw, m, n, dtype=torch.float32)
        rows, columns = parts_of(draw, m), parts_of(draw, n)
        by_row, by_column = sums(x)
        assert torch.equal(sums(x[rows])[0], by_row[rows]) and torch.equal(sums(x[:, columns])[1], by_column[columns])
        assert torch.equal(sums(x.T)[0], by_column) and torch.equal(sums(x.T)[1], by_row)


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "divide"])
def test_function_of_a_number_does_not_depend_on_company(name: str) -> None:
    """The interpreter calls these functions of NumPy, which choose code by the processor."""
    draw, function = Random(0), getattr(np, name)
    x = operand(draw, 1000, dtype=torch.float32).abs().numpy()
    whole = function(x, x[::-1]) if name == "divide" else function(x)
    for _ in range(50):
        part = slice(draw.randrange(900), draw.randrange(900, 1000), draw.randrange(1, 9))
        assert np.array_equal(function(x[part], x[::-1][part]) if name == "divide" else function(x[part]), whole[part])


@pytest.mark.parametrize("name", [name for name in NOT_OURS if hasattr(np, name)])
def test_interpreter_cannot_call_the_blas(name: str) -> None:
    from triton.runtime import interpreter

    refused: Any = getattr(interpreter.np, name)
    with pytest.raises(AssertionError, match=f"numpy.{name} adds in an order"):
        (refused.norm if name == "linalg" else refused)(np.ones(2))


def test_kernels_run_where_numpy_has_no_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.ops.linear.triton import linear_triton

    x, weight = random(5, 70, dtype=torch.float16), random(33, 70, dtype=torch.float16)
    expected = linear_triton(x, weight, None)
    for name in NOT_OURS:
        monkeypatch.setattr(np, name, None, raising=False)
    assert torch.equal(linear_triton(x, weight, None), expected)
