"""The measured floors (bandwidth, multiply-adds) belong to the tier in use, and have plausible sizes."""

import pytest

from tests.worker.ops.harness.cpu_tiers import EMULATED, HERE, needs_library, use
from worker.ops import native as library
from worker.ops import roofline

pytestmark = needs_library


@pytest.mark.parametrize("which", [which for which in HERE if which != EMULATED])
def test_measure_gives_the_figures_of_the_tier(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MEMORY", 1 << 20)
    monkeypatch.setattr(roofline, "TRY_S", 1e-3)
    with use(which):
        found = roofline.measure(1)
    assert found is not None
    assert found.read_gb_s > 0.01 and found.fp32_gflop_s > 0.01
    assert (found.bf16_gflop_s is not None) == (which in ("avx512bf16", "amx"))
    assert found.bf16_gflop_s is None or found.bf16_gflop_s > 0.01


def test_measure_without_the_library_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    assert roofline.measure(1) is None
