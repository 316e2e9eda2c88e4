from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, near, poisoned, random
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier  # noqa: F401
from worker.ops.norm import add_rms_norm, rms_norm
from worker.ops.norm.reference import add_rms_norm_torch, rms_norm_torch, sum_split_k

SHAPES = [(1, 8), (3, 96), (5, 1000), (2, 3, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("function", [rms_norm, rms_norm_torch])
def test_rms_norm_follows_the_formula(shape: tuple[int, ...], offset: bool, function: Callable[..., Tensor]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    close(function(x, weight, 1e-5, offset=offset), exact.float())


def test_llama_rounds_before_the_weight_and_gemma_after() -> None:
    x, weight = random(4, 64, dtype=torch.bfloat16), random(64, seed=1).mul(0.01).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm_torch(x, weight, 1e-6), weight * normed.bfloat16())
    assert torch.equal(rms_norm_torch(x, weight, 1e-6, offset=True), (normed * (1 + weight.float())).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_rounds_the_sum_before_the_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (random(4, 64, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0]
    normed, total = add_rms_norm_torch(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_torch(total, weight, 1e-6))
    close(add_rms_norm(x, residual, weight, 1e-6)[0], normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [add_rms_norm, add_rms_norm_torch])
def test_add_rms_norm_scales_what_it_adds(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    x, residual, weight = (random(4, 70, dtype=dtype, seed=i) for i in range(3))
    normed, total = function(x, residual, weight[0], 1e-6, scale=0.22)
    close(total, (x.double() * 0.22 + residual.double()).to(dtype))
    close(normed, rms_norm_torch(total, weight[0], 1e-6))


@pytest.mark.parametrize("function", [add_rms_norm, add_rms_norm_torch])
def test_add_rms_norm_without_a_weight_only_adds(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x, residual, after = (random(4, 70, dtype=torch.bfloat16, seed=i) for i in range(3))
    normed, total = function(x, residual, None, 1e-6, x_norm=after[0])
    assert torch.equal(normed, total)
    close(total, rms_norm_torch(x, after[0], 1e-6) + residual)


def test_rms_norm_accepts_strided_heads() -> None:
    fused, weight = random(5, 6, 32), random(32, seed=1)
    got = rms_norm(fused[:, 2:4], weight, 1e-6)
    assert got.is_contiguous()
    close(got, rms_norm_torch(fused[:, 2:4].contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_triton_agrees_with_torch(
    shape: tuple[int, ...], offset: bool, dtype: torch.dtype, device: str
) -> None:
    from worker.ops.norm.triton import add_rms_norm_triton, rms_norm_triton

    x, residual = (random(*shape, dtype=dtype, device=device, seed=i) for i in range(2))
    weight = random(shape[-1], dtype=dtype, device=device, seed=2)
    with poisoned():
        alone = rms_norm_triton(x, weight, 1e-6, offset=offset)
        normed, total = add_rms_norm_triton(x, residual, weight, 1e-6, offset=offset)
    close(alone, rms_norm_torch(x, weight, 1e-6, offset=offset))
    near(alone, rms_norm_torch(x.float(), weight.float(), 1e-6, offset=offset))
    assert torch.equal(total, x + residual)
    close(normed, rms_norm_torch(total, weight, 1e-6, offset=offset))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_add_rms_norm_triton_scales_and_may_have_no_weight(dtype: torch.dtype, device: str) -> None:
    from worker.ops.norm.triton import add_rms_norm_triton

    x, residual, weight = (random(3, 600, dtype=dtype, device=device, seed=i) for i in range(3))
    with poisoned():
        got = add_rms_norm_triton(x, residual, weight[0], 1e-6, offset=False, scale=0.22)
        bare = add_rms_norm_triton(x, residual, None, 1e-6, offset=False, x_norm=weight[0], scale=0.22)
    for one, other in zip(got, add_rms_norm_torch(x, residual, weight[0], 1e-6, scale=0.22), strict=True):
        close(one, other)
    for one, other in zip(bare, add_rms_norm_torch(x, residual, None, 1e-6, x_norm=weight[0], scale=0.22), strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("offset", [False, True])
def test_add_rms_norm_triton_applies_x_norm_first(offset: bool, dtype: torch.dtype, device: str) -> None:
    """The fused kernel has the bits of two kernels, one after the other."""
    from worker.ops.norm.triton import add_rms_norm_triton, rms_norm_triton

    x, residual = (random(3, 600, dtype=dtype, device=device, seed=i) for i in range(2))
    after, weight = (random(600, dtype=dtype, device=device, seed=i) for i in range(2, 4))
    with poisoned():
        got = add_rms_norm_triton(x, residual, weight, 1e-6, offset=offset, x_norm=after)
    first = rms_norm_triton(x, after, 1e-6, offset=offset)
    for one, other in zip(got, add_rms_norm_triton(first, residual, weight, 1e-6, offset=offset), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(got, add_rms_norm(x, residual, weight, 1e-6, offset=offset, x_norm=after), strict=True):
        close(one, other)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("count", [2, 5])
def test_add_rms_norm_triton_adds_partial_sums(count: int, dtype: torch.dtype, device: str) -> None:
    from worker.ops.norm.triton import add_rms_norm_triton

    terms = random(count, 3, 600, device=device)
    residual, weight = random(3, 600, dtype=dtype, device=device), random(600, dtype=dtype, device=device)
    got = add_rms_norm_triton(terms, residual, weight, 1e-6, offset=True, x_norm=weight)
    whole = add_rms_norm_triton(sum_split_k(terms, 2, dtype), residual, weight, 1e-6, offset=True, x_norm=weight)
    for one, other in zip(got, whole, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        add_rms_norm_torch(terms, residual, weight, 1e-6, offset=True, x_norm=weight), whole, strict=True
    ):
        close(one, other)


def test_triton_takes_strided_tokens(device: str) -> None:
    from worker.ops.norm.triton import rms_norm_triton

    fused, weight = random(5, 6, 32, device=device), random(32, seed=1, device=device)
    close(rms_norm_triton(fused[:, 2:4], weight, 1e-6, offset=False), rms_norm_torch(fused[:, 2:4], weight, 1e-6))


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight[0].float(), weight[1].float(), 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [rms_norm, rms_norm_torch])
def test_a_weight_with_a_bias_makes_a_layer_norm(shape: tuple[int, ...], function: Callable[..., Tensor]) -> None:
    x, weight = random(*shape) + 3, random(2, shape[-1], seed=1)
    close(function(x, weight, 1e-5), layer_norm(x, weight))


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("shape", [(1, 5), (3, 100), (40, 1000)])
def test_layer_norm_of_the_library_agrees_with_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (random(*shape, dtype=dtype, seed=seed) + 3 for seed in (0, 1))
    weight = random(2, shape[1], dtype=dtype, seed=2)
    got, total = add_rms_norm(x, residual, weight, 1e-5, scale=0.5)
    close(total, (x.double() * 0.5 + residual.double()).to(dtype))
    assert torch.equal(got, rms_norm(total, weight, 1e-5))
    close(got, rms_norm_torch(total, weight, 1e-5))
    assert torch.equal(rms_norm(total[:1], weight, 1e-5), got[:1])


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (5, 1000)])
def test_layer_norm_triton_agrees_with_torch(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from worker.ops.norm.triton import add_rms_norm_triton, rms_norm_triton

    x, residual = (random(*shape, dtype=dtype, device=device, seed=seed) + 3 for seed in (0, 1))
    weight = random(2, shape[1], dtype=dtype, device=device, seed=2)
    with poisoned():
        got, total = add_rms_norm_triton(x, residual, weight, 1e-5, offset=False)
    assert torch.equal(got, rms_norm_triton(total, weight, 1e-5, offset=False))
    for one, other in zip((got, total), add_rms_norm_torch(x, residual, weight, 1e-5), strict=True):
        close(one, other)
