"""Reading a record, and the errors for a file that is not a record."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from deploy.cli.replay_requests import read_record
from deploy.launcher.child_command import CliError
from shared.record import RecordedRequest
from tests.deploy.cli.requests import recorded

Writes = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writes:
    def write(*requests: RecordedRequest, end: bytes = b"") -> Path:
        file = tmp_path / "record"
        file.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests) + end)
        return file

    return write


def test_requests_are_in_the_order_of_their_arrival(write: Writes) -> None:
    late, early = recorded(began="2026-01-01T00:00:02+00:00"), recorded(began="2026-01-01T00:00:01+00:00")
    record = read_record(write(late, early))
    assert (list(record.requests), list(record.notes)) == ([early, late], [])


def test_what_cannot_be_sent_is_left_out_and_counted(write: Writes) -> None:
    gone, hashes = recorded(outcome="client_gone"), recorded(request=None, lost=3)
    record = read_record(write(recorded(), gone, hashes, end=b'{"sluice_rec'))
    assert list(record.requests) == [recorded()]
    assert [note.partition(" of ")[0] if "last line" in note else note for note in record.notes] == [
        "the last line",
        "1 requests have no text",
        "1 requests had not finished when they were recorded",
        "3 requests are missing in the record, which could not be written in time",
    ]


@pytest.mark.parametrize(
    ("requests", "end", "words"),
    [
        ((), b"", "contains no complete line of a record"),
        ((), b'{"sluice_record":1', "contains no complete line of a record"),
        ((), b"\x89PNG\r\n\x1a\n", "line 1 of .* is no line of a record, as --record writes them"),
        ((recorded(),), b'{"time": 1}\n', "line 2 of .* is no line of a record"),
        ((recorded(request=None),), b"", "has only hashes: .* is made with --record-text"),
        ((recorded(outcome="error"),), b"", "contains no request that had finished"),
        ((msgspec.structs.replace(recorded(), sluice_record=2),), b"", "line 1 of .* has version 2 of the format"),
    ],
)
def test_file_without_requests_is_refused(
    write: Writes, requests: tuple[RecordedRequest, ...], end: bytes, words: str
) -> None:
    with pytest.raises(CliError, match=words):
        read_record(write(*requests, end=end))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be read: No such file or directory"):
        read_record(tmp_path / "missing")


def test_older_files_are_read_before_the_newest(write: Writes) -> None:
    began = "2026-01-01T00:00:00+00:00"
    for name in ("3", "10", "2.bak", "1"):
        file = write(recorded(request_id=name, began=began))
        file.rename(file.with_name(f"record.{name}"))
    record = read_record(write(recorded(request_id="newest", began=began)))
    assert [request.request_id for request in record.requests] == ["10", "3", "1", "newest"]


def test_torn_lines_are_left_out_and_counted(write: Writes) -> None:
    line = msgspec.json.encode(recorded())
    torn = line[:50] + b"\n" + line[:70] + line + b"\n" + line + b"\n"
    record = read_record(write(recorded(), end=torn))
    assert list(record.requests) == [recorded()] * 2
    assert [note.partition(" of ")[0] for note in record.notes] == ["2 lines"]
