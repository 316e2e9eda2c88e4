"""The writer that never blocks. tests/frontend/observability/test_access_log.py tests its use by the access log."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shared.log import MAX_WRITE_BYTES, NonBlockingStream, NonBlockingWriter
from tests.patience import PATIENCE_S


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)


def test_lines_beyond_the_limit_are_dropped_and_counted() -> None:
    with pipe() as (reading, writing):
        writer = NonBlockingWriter.to(writing, limit=10)
        writer.put(b"12345\n")
        writer.put(b"67890\n")
        writer.close(10.0)
        assert os.read(reading, 100) == b"12345\n" and writer.dropped == 1
        os.close(writing)


def test_lines_are_written_in_order_and_whole() -> None:
    lines = [b"%d " % i + b"x" * (i % 300) + b"\n" for i in range(200)]
    with pipe() as (reading, writing):
        writer = NonBlockingWriter.to(writing)
        for line in lines:
            writer.put(line)
        writer.close(10.0)
        os.close(writing)
        received = b"".join(iter(lambda: os.read(reading, MAX_WRITE_BYTES), b""))
    assert received == b"".join(lines) and not writer.dropped


def test_stream_encodes_text_and_leaves_the_descriptor_open() -> None:
    with pipe() as (reading, writing), os.fdopen(writing, "w") as plain:
        stream = NonBlockingStream(plain)
        assert (stream.write("né\n"), stream.isatty()) == (3, False)
        stream.flush()
        stream.close()
        assert os.read(reading, 100) == "né\n".encode() and not plain.closed


def test_full_disk_drops_and_counts_lines() -> None:
    with open("/dev/full", "wb") as full:
        writer = NonBlockingWriter.to(full.fileno())
        for _ in range(3):
            writer.put(b"x\n")
        writer.close(10.0)
        assert writer.dropped == 3


def test_thread_that_cannot_start_is_retried_at_the_next_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pipe() as (reading, writing):
        writer = NonBlockingWriter.to(writing)
        with monkeypatch.context() as no_threads:
            no_threads.setattr(threading.Thread, "start", start)
            writer.put(b"first\n")
            writer.close()
        writer.put(b"second\n")
        writer.close(10.0)
        assert os.read(reading, 100) == b"first\nsecond\n" and not writer.dropped
        os.close(writing)


def test_line_after_one_that_was_torn_begins_on_its_own() -> None:
    room, got = [3], bytearray()

    def write(data: bytes) -> int:
        taken = data[: room.pop()] if room else data
        got.extend(taken)
        return len(taken)

    writer = NonBlockingWriter(write)
    writer.put(b"first\n")
    wait_until(lambda: bool(writer.dropped))
    writer.put(b"second\n")
    writer.close(10.0)
    assert bytes(got) == b"fir\nsecond\n" and writer.dropped == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
