"""The table of compiled kernels, and which kernels count as problems."""

from bench.gpu.offline.compile_table import page
from bench.gpu.offline.compiling import Binary
from bench.gpu.offline.triton_offline import Usage

FITS = Binary("_linear_kernel", "a", 90, 1.0, used=Usage(168, 0, 200 << 10), kinds=("wgmma",))
TOO_LARGE = Binary("_linear_kernel", "b", 89, 1.0, used=Usage(96, 0, 100 << 10), kinds=("mma",))
SPILLS = Binary("_norm_kernel", "c", 90, 1.0, used=Usage(255, 64, 0))
FAILS = Binary("_norm_kernel", "d", 80, 1.0, error="CompilationError: no such type")


def test_compile_table_has_the_most_of_all_variants() -> None:
    other = Binary("_linear_kernel", "e", 90, 1.0, used=Usage(40, 0, 220 << 10), kinds=("mma",))
    (row,) = [line for line in page([FITS, other]).splitlines() if line.startswith("| linear ")]
    assert "2 variants, 168 r, 220 K, mma/wgmma" in row


def test_compile_table_lists_what_does_not_fit() -> None:
    told = page([FITS, TOO_LARGE, SPILLS, FAILS])
    assert "Problems: 3" in told
    assert "sm_89: 102400 bytes of shared memory, 101376 are there: b" in told
    assert "sm_90: 64 bytes a thread are spilled: c" in told
    assert "sm_80: CompilationError: no such type: d" in told
    assert not FITS.problem
