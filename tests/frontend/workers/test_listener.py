"""A frontend's counters of events on the wire begin at zero."""

from dataclasses import asdict

from frontend.workers.connection import ConnectionCounters


def test_wire_counters_begin_at_zero_and_count_apart() -> None:
    counters = ConnectionCounters()
    assert set(asdict(counters).values()) == {0}
    counters.resyncs += 2
    assert (counters.resyncs, counters.gaps, ConnectionCounters().resyncs) == (2, 0, 0)
