"""A line of a record of requests is read as it was written."""

import msgspec

from shared.record import VERSION, RecordedRequest


def test_line_leaves_out_what_does_not_apply_and_is_read_as_it_was_written() -> None:
    request = RecordedRequest(VERSION, "2026-01-01T00:00:00+00:00", "r", "/v1/completions", 200, "finished", 1.5)
    line = msgspec.json.encode(request)
    assert set(msgspec.json.decode(line)) == {
        "sluice_record", "began", "request_id", "route", "status", "outcome", "total_ms",
    }  # fmt: skip
    assert msgspec.json.decode(line, type=RecordedRequest) == request
