"""The C library under AddressSanitizer touches no memory beyond its arrays, with any size that a config may have.

Each day for one of the instruction sets that this machine has.
"""

from datetime import date
from pathlib import Path

import pytest

from tests.worker.ops.cpu import sanitized
from tests.worker.ops.harness.cpu_tiers import needs_library

pytestmark = needs_library
TIER = sanitized.tier_of(date.today())
TESTS = "tests/worker/models/test_cpu_decoder_bounds.py"
DRAWS = "tests/worker/ops/cpu/test_sampling.py"  # whose widths are those of any vocabulary


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sanitized.compiled(tmp_path_factory.mktemp("library"), TIER)


@pytest.mark.slow
def test_sizes_at_the_bounds_stay_within_their_arrays(library: Path) -> None:
    done = sanitized.run(library, TIER, TESTS, DRAWS, "-k", "not emulated and not 151936")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize(("limit", "model"), [("MAX_CHOSEN", "experts"), ("MAX_TAPS", "taps")])
def test_size_beyond_a_bound_is_reported(library: Path, limit: str, model: str) -> None:
    """Shows that the test above can fail: a size beyond a bound is reported."""
    done = sanitized.run(library, TIER, TESTS, "-k", f"{model} and not emulated", "-s", beyond=limit)
    assert done.returncode == sanitized.FAULT and "AddressSanitizer" in done.stderr, done.stdout[-2000:]
