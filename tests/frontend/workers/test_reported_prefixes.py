"""What a frontend knows of workers' prefixes. tests/worker/engine/test_prefix_report.py tests workers' reports."""

import pytest

from frontend.workers.routing import ReportedPrefixes
from shared.messages import CachedPrefixes
from shared.wire import pack_u32


def test_workers_with_a_prefix_come_and_go() -> None:
    known = ReportedPrefixes()
    assert list(known.take("a", CachedPrefixes(pack_u32([1, 2]), check=3))) == []
    known.take("b", CachedPrefixes(pack_u32([2]), check=2))
    assert (known.holders(1), known.holders(2), known.holders(3)) == (("a",), ("a", "b"), ())
    assert list(known.take("a", CachedPrefixes(b"", pack_u32([2]), check=1))) == [2]
    assert known.holders(2) == ("b",)
    known.forget("b")
    assert len(known) == 1 and known.holders(2) == ()


def test_sweep_mends_what_a_lost_report_broke_and_a_broken_sweep_changes_nothing() -> None:
    known = ReportedPrefixes()
    known.take("a", CachedPrefixes(pack_u32([1, 2]), check=3))
    parts = [
        CachedPrefixes(check=2 ^ 4 ^ 8, first=at, end=at + 1, total=3, part=pack_u32([key]))
        for at, key in enumerate((2, 4, 8))
    ]
    known.take("a", parts[1])  # a part of a sweep whose beginning was missed
    known.take("a", parts[2])
    known.take("a", parts[0])
    known.take("a", parts[2])  # the second part was lost
    assert known.holders(1) == ("a",) and known.holders(4) == ()
    for part in parts:
        known.take("a", part)
    assert known.holders(1) == () and all(known.holders(key) == ("a",) for key in (2, 4, 8))


def test_broken_column_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes length not a multiple"):
        ReportedPrefixes().take("a", CachedPrefixes(b"123"))
