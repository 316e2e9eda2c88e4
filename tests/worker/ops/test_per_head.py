"""Products in which every head has a weight of its own: right on every instruction set and in Triton, row by row."""

import pytest
import torch

from tests.worker.ops.harness.cases import poisoned, random
from tests.worker.ops.harness.cpu_tiers import close, dtypes, needs_library, tier  # noqa: F401
from worker.ops.moe import linear_per_head
from worker.ops.moe.packed import PackedExperts, pack_experts
from worker.ops.moe.reference import linear_per_head_torch

HEADS, K, N = 5, 40, 52


def weights(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return (random(HEADS, N, K, device=device) / K**0.5).to(dtype)


@needs_library
@pytest.mark.usefixtures("tier")
@dtypes
def test_products_in_c_are_those_of_torch_and_depend_on_no_other_row(dtype: torch.dtype) -> None:
    plain = weights(dtype)
    packed = pack_experts(([one] for one in plain), count=HEADS, dtype=dtype, invariant=True)
    x = random(33, HEADS, K + 8, dtype=dtype)[:, :, :K]  # strided, as the plain part of queries is
    got = linear_per_head(x, packed)
    assert packed.cpu is not None and got.is_contiguous()
    close(got, torch.einsum("thk,hnk->thn", x.float(), plain.float()).to(dtype))
    assert torch.equal(got, torch.cat([linear_per_head(x[i : i + 1], packed) for i in range(33)]))
    assert torch.equal(got, linear_per_head_torch(x, packed))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_in_triton_are_those_of_torch(rows: int, device: str) -> None:
    from worker.ops.moe.triton import linear_per_head_triton

    dtype = torch.float16
    packed = PackedExperts(weights(dtype, device), None)
    x = random(rows, HEADS, K + 8, dtype=dtype, device=device)[:, :, :K]
    with poisoned():
        got = linear_per_head_triton(x, packed)
    close(got, linear_per_head_torch(x, packed))
    with poisoned():
        assert torch.equal(got[:1], linear_per_head_triton(x[:1], packed)), "a row depends on no other row"
