import pytest
import torch

from tests.worker.kernels.cases import TRITON_DTYPES, close, random
from worker.kernels.linear import linear, linear_torch, pack


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_product(invariant: bool, biased: bool) -> None:
    x, weight = random(5, 70), random(33, 70, seed=1) / 8
    bias = random(33, seed=2) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    close(linear(x, pack(weight, bias, invariant=invariant)), expected.float())
    close(linear_torch(x, weight, bias), expected.float())


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 48, 70), (5, 130, 256), (70, 130, 72)])
def test_triton(rows: int, columns: int, depth: int, dtype: torch.dtype, device: str) -> None:
    from worker.kernels.linear_triton import linear_triton

    x = random(rows, depth, dtype=dtype, device=device)
    weight = random(columns, depth, dtype=dtype, device=device, seed=1) / 8
    bias = random(columns, dtype=dtype, device=device, seed=2)
    expected = x.double() @ weight.double().T
    close(linear_triton(x, weight, None), expected.to(dtype))
    close(linear_triton(x, weight, bias), (expected + bias.double()).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    """Across both tile shapes. Only hardware can tell: the interpreter multiplies with a library."""
    from worker.kernels.linear_triton import linear_triton

    x = random(300, 1024, dtype=dtype, device=device)
    weight = random(768, 1024, dtype=dtype, device=device, seed=1)
    whole = linear_triton(x, weight, None)
    for begin, end in ((0, 1), (7, 8), (10, 42), (100, 164), (100, 165)):
        assert torch.equal(linear_triton(x[begin:end], weight, None), whole[begin:end])
