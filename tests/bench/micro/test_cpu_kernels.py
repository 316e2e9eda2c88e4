"""`python -m bench.micro.cpu_kernels` measures every format; here with tiny products."""

import pytest

from bench.micro import cpu_kernels
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.ops.roofline import Floors

LIMITS = Floors(10.0, 100.0, None)
pytestmark = needs_library


@pytest.mark.parametrize("section", ["products", "decode"])
def test_products_have_a_row_for_every_format(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "SHAPES", ((64, 256),))
    monkeypatch.setattr(cpu_kernels, "SPREAD", 1)
    head, *rows = cpu_kernels.SECTIONS[section](tuple(cpu_kernels.FORMATS), LIMITS, 1)
    assert [row[0] for row in rows] == [f"256 → 64, {name}" for name in cpu_kernels.FORMATS]
    assert all(len(row) == len(head) and float(row[1]) > 0 for row in rows)
