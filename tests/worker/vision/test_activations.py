"""The exact GELU of towers: the same bits with any number of threads and beside any rows."""

import pytest
import torch
from torch.nn.functional import gelu

from worker.operations import FAST
from worker.ops.linear.packed import pack
from worker.vision.encoder import activated_linear, exact_gelu, gated_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_gelu_of_a_row_depends_on_neither_threads_nor_rows(dtype: torch.dtype) -> None:
    x = torch.randn(700, 331, generator=torch.Generator().manual_seed(1)).to(dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(exact_gelu(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.allclose(found[0].float(), gelu(x).float(), atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_linears_with_the_exact_gelu_are_those_of_torch() -> None:
    draw = torch.Generator().manual_seed(2)
    x, gate, up = (torch.randn(size, generator=draw) for size in ((9, 32), (48, 32), (48, 32)))
    gated = gated_linear(x, pack(torch.cat([gate, up]), invariant=True), "gelu", FAST)
    assert torch.allclose(gated, gelu(x @ gate.T) * (x @ up.T), atol=1e-4)
    plain = activated_linear(x, pack(up, invariant=True), "gelu", FAST)
    assert torch.allclose(plain, gelu(x @ up.T), atol=1e-4)
    assert not torch.allclose(
        gated, gated_linear(x, pack(torch.cat([gate, up]), invariant=True), "silu", FAST), atol=1e-2
    )
