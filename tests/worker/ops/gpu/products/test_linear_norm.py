"""A product and its norm in one kernel have the bits of two kernels, and leave the counter at zero."""

import pytest
import torch

from tests.worker.ops.harness.cases import random
from worker.ops.launch_options import GpuOptions
from worker.ops.linear.triton import linear_triton
from worker.ops.linear.triton_fused import can_add_norm, linear_add_norm_triton
from worker.ops.norm.triton import add_rms_norm_triton


@pytest.mark.parametrize(("rows", "layer", "last"), [(1, False, False), (2, True, False), (2, False, True)])
def test_bits_are_those_of_product_and_norm(rows: int, layer: bool, last: bool, device: str) -> None:
    """The product, and its sum with the residual, are normalized.

    layer: whether the norms are layer norms with a bias, instead of RMS norms with an offset
    last: if true, nothing is normalized, so the result is the sum
    """
    options = GpuOptions(fused_norms=True).on(torch.device(device))
    dtype, columns, depth = torch.float16, 72, 1000
    x, weight, bias, residual = (
        random(*shape, dtype=dtype, seed=seed).to(device)
        for seed, shape in enumerate(((rows, depth), (columns, depth), (columns,), (rows, columns)))
    )
    norm = None if last else random(*((2, columns) if layer else (columns,)), dtype=dtype, seed=5).to(device)
    more = {"offset": not layer, "x_norm": norm, "scale": 0.3}
    assert can_add_norm(x, weight)
    partials = linear_triton(x, weight, bias, split_k=True)
    expected = add_rms_norm_triton(partials, residual, norm, 1e-5, **more)  # type: ignore[arg-type]
    for _ in range(2):
        got = linear_add_norm_triton(x, weight, bias, residual, norm, 1e-5, **more, options=options)  # type: ignore[arg-type]
        assert all(map(torch.equal, got, expected)) and partials.ndim == 3
    assert options.arrivals is not None and not options.arrivals.any()


@pytest.mark.parametrize(("rows", "columns", "depth"), [(3, 72, 1000), (1, 16384, 1024), (1, 72, 128)])
def test_other_products_are_not_fused(rows: int, columns: int, depth: int) -> None:
    """Products with more rows, enough tiles for all multiprocessors, or a single chain along K are not fused."""
    assert not can_add_norm(torch.empty(rows, depth, device="meta"), torch.empty(columns, depth, device="meta"))
