"""Fixtures of the C library's tests, for every instruction set of this machine and both dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness import emulated_amx
from worker.ops import native as c_library
from worker.ops import native as library
from worker.ops import native_build, paged_kv
from worker.ops.native_build import SAME_BITS, TIERS, VARIABLE

MOST = TIERS.index(c_library.tier())

needs_library = pytest.mark.skipif(not MOST, reason="the C library does not run here: no compiler, or no AVX2")

EMULATED = "amx emulated"  # see emulated_amx.py
CAN_EMULATE = "avx512bf16" in TIERS[: MOST + 1]
HERE = [one for one in TIERS[1 : MOST + 1] if one not in SAME_BITS]
HERE += [EMULATED] if CAN_EMULATE and "amx" not in TIERS[: MOST + 1] else []
# Tiers that multiply integers faster, with the bits of another tier. Most tests of the other tier need no repetition.
FASTER = [one for index, one in enumerate(TIERS) if one in SAME_BITS and MOST and library.library().supports(index)]


@contextmanager
def use(which: str) -> Iterator[None]:
    """Uses a tier of HERE. Asserts that emulated AMX did nothing that a processor, or its system, would refuse."""
    with pytest.MonkeyPatch.context() as patch:
        if which == EMULATED:
            emulated_amx.library().emulated_machine(1, 1)
            patch.delenv(VARIABLE, raising=False)
            patch.setattr(library, "built", emulated_amx.path)
        else:
            patch.setenv(VARIABLE, which)
        _forget()
        assert c_library.tier() == ("amx" if which == EMULATED else which)
        try:
            yield
        finally:
            _forget()
    assert which != EMULATED or not emulated_amx.fault()


def as_written(cache_k: Tensor, cache_v: Tensor) -> list[Tensor]:
    """Returns copies of keys and values [pages, page_size, Hk, D] in the layout of the C kernels."""
    k, v = cache_k.clone(), cache_v.clone()
    if paged_kv.v_is_paired(v):
        v = v.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2).reshape(v.shape)
    if paged_kv.k_is_transposed(v):
        k = k.unflatten(1, (-1, 32)).unflatten(4, (-1, 2)).permute(0, 1, 3, 4, 2, 5).reshape(k.shape)
    return [k, v]


def _forget() -> None:
    for cached in (native_build.begin, library.library, library.level, library.kernels):
        cached.cache_clear()


@pytest.fixture(params=HERE)
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with each instruction set of HERE, or with those that an indirect parametrization names."""
    with use(request.param):
        yield c_library.tier()


DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
# For `in_pairs`: the C library has functions of their own for each instruction set and dtype, so all of these meet.
FUNCTIONS = {"tier, dtype": list(product(HERE, DTYPES))}


def close(ours: Tensor, plain: Tensor) -> None:
    """Asserts that no value is NaN, and that errors are below 1e-5 (fp32) or 2e-2 (bf16) of the largest value.

    For bf16, the limit allows for a square, which doubles the error of rounding.
    """
    wide, other = ours.double(), plain.double()
    limit = 1e-5 if ours.dtype == torch.float32 else 2e-2
    assert float((wide - other).abs().max() / other.abs().max()) <= limit
