"""What the tests of the C library share: every instruction set this machine has, in both dtypes."""

import pytest
import torch
from torch import Tensor

from worker.kernels import library, native

TIERS = {"none": 0, "avx2": 1, "avx512": 2, "avx512bf16": 3, "amx": 4}
MOST = TIERS[native.tier()]

needs_library = pytest.mark.skipif(not MOST, reason="the C library does not run here: no compiler, or no AVX2")


@pytest.fixture(params=range(1, MOST + 1))
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SLUICE_NATIVE_TIER", str(request.param))
    for cached in (library.level, library.kernels):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    return int(request.param)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def close(ours: Tensor, plain: Tensor) -> None:
    """Within 1e-5 (fp32) or 1e-2 (bf16) of the largest value; no NaN."""
    wide, other = ours.double(), plain.double()
    limit = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert float((wide - other).abs().max() / other.abs().max()) <= limit
