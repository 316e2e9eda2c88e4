"""The products of adapters by the Triton kernels, whose rows do not depend on each other."""

import pytest
import torch

from tests.worker.kernels.harness.cases import TRITON_DTYPES, close, random
from worker.adapters.loaded import Part, Product
from worker.kernels.linear import PackedLinear


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("rank", [32, 96])
def test_product_is_that_of_both_matrices_and_each_row_that_of_it_alone(
    rank: int, dtype: torch.dtype, device: str
) -> None:
    from worker.kernels.gpu.products.linear import linear_triton

    def multiply(x: torch.Tensor, packed: PackedLinear, *, fp32_out: bool = False) -> torch.Tensor:
        return linear_triton(x, packed.weight, packed.bias, fp32_out=fp32_out)

    x = random(70, 72, dtype=dtype, device=device)
    a, b = (random(*shape, dtype=dtype, device=device, seed=1) / 8 for shape in ((rank, 72), (130, rank)))
    scale = random(130, device=device, seed=2)
    part = Part(PackedLinear(b, None, True), 0, rank, 0, 130)
    product = Product(PackedLinear(a, None, True), (part,), scale)

    def of(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(len(x), 130, device=device)
        product.add(y, torch.arange(len(x), device=device), x, 1.0, multiply)
        return y

    found = of(x)
    inner = (x.double() @ a.double().T).to(dtype).double()
    if dtype is torch.float32:
        close(found, ((inner @ b.double().T) * scale.double()).float())
    for begin, end in ((0, 1), (3, 20), (20, 70)):
        assert torch.equal(of(x[begin:end]), found[begin:end])
