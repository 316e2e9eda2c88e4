"""Reading an HTTP answer: however the bytes are cut, the reader returns whole lines of the body and nothing else."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client.http_response import HttpResponse, MalformedResponse

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return HEAD + b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def lines(data: bytes, cuts: list[int]) -> list[bytes]:
    answer = HttpResponse()
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    found = [line for a, b in pairwise(places) for line in answer.feed(data[a:b])]
    assert answer.finish() == b""
    return found


@given(st.lists(st.binary(max_size=9).map(lambda text: text.replace(b"\n", b"").rstrip(b"\r")), max_size=8), st.data())
def test_lines_are_the_same_for_all_chunks_and_reads(texts: list[bytes], data: st.DataObject) -> None:
    body = b"".join(text + b"\n" for text in texts)
    places = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True) if a < b]
    cuts = data.draw(st.lists(st.integers(0, 500), max_size=12))
    assert lines(chunked(*pieces), cuts) == texts


def test_body_lines_and_chunk_sizes_are_not_confused() -> None:
    body = b'data: {"a":1}\r\n5\r\n0\r\n\r\ndata: {"b":2}\n'
    pieces = chunked(body[:9], body[9:20], body[20:], end=b"0\r\nx-trailer: 1\r\n\r\n")
    assert lines(pieces, []) == [b'data: {"a":1}', b"5", b"0", b"", b'data: {"b":2}']


def test_body_with_content_length_ends_there_and_keeps_its_last_line() -> None:
    answer = HttpResponse()
    assert answer.feed(b"HTTP/1.1 503 Busy\r\ncontent-length: 7\r\n\r\none\ntwo") == [b"one"]
    assert (answer.status, answer.complete, answer.finish()) == (503, True, b"two")


def test_body_without_framing_ends_with_the_connection() -> None:
    answer = HttpResponse()
    assert answer.feed(b"HTTP/1.0 200 OK\r\n\r\none\ntw") + answer.feed(b"o\nend") == [b"one", b"two"]
    assert not answer.complete
    assert answer.finish() == b"end"


def test_informational_response_is_skipped() -> None:
    answer = HttpResponse()
    assert answer.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"hello\n")) == [b"hello"]
    assert (answer.status, answer.complete) == (200, True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        chunked(b"x\n", end=b""),
        HEAD + b"5\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab",
    ],
)
def test_truncated_response_is_malformed(data: bytes) -> None:
    answer = HttpResponse()
    answer.feed(data)
    with pytest.raises(MalformedResponse):
        answer.finish()


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"-1\r\n", HEAD + b"1\r\nabc\r\n", b"x" * 70_000]
)
def test_response_that_is_not_http_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        HttpResponse().feed(data)
