"""frontend/server/http_protocol.py against endless requests, and requests that two servers may read differently."""

import asyncio

import pytest

from frontend.server.http_protocol import ConnectionLimits
from frontend.text.tokenizer import Tokenizer
from tests.frontend.server.harness import BODY, HELLO, LAST, QUICK, case, on_uvloop, post, status, statuses
from tests.frontend.serving import until

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n"
CLOSE = b"Connection: close\r\n"
ROOMY = ConnectionLimits(connections=50, header_bytes=4096)
BLOCK = 256 << 10  # most bytes that the event loop reads at once

AMBIGUOUS = (
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nhost: y\r\n" + H2C + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: x\n\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX\0: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n",
    post(length="+5"),
    post(length="5, 5"),
    post(length="0x5"),
    post(head=b"Transfer-Encoding: chunked\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"),
    CHUNKED.replace(b"chunked", b"chunked, identity") + b"0\r\n\r\n",
    CHUNKED.replace(b"chunked", b"xchunked") + b"0\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"0x1\r\n \r\n0\r\n\r\n",
    CHUNKED + b"fffffffffffffffff\r\n",
    CHUNKED + b"1\n \n0\n\n",
)  # fmt: skip


def chunks(body: bytes, size: int, extension: bytes = b"") -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)


@pytest.mark.parametrize(
    "piece",
    [
        b"X-Trailer: " + b"a" * 500 + b"\r\n",
        b"a" * 1000,
    ],
    ids=["lines", "one-line"],
)  # fmt: skip
@on_uvloop
async def test_trailers_without_end_are_answered_431(tokenizer: Tokenizer, piece: bytes) -> None:
    async with case(tokenizer, ROOMY) as it:
        reader, writer = await it.connect(CHUNKED + chunks(BODY, 10) + b"0\r\nX-First: ")
        sent = 0
        while not it.refused and sent < 8 * BLOCK:
            writer.write(piece)
            sent += len(piece)
            await asyncio.sleep(0)
        await until(lambda: it.refused)
        assert it.refused == {"head_too_large": 1} and sent < 8 * BLOCK
        assert status(await reader.read()) == 431 and not it.pool.submitted


@on_uvloop
async def test_chunk_extensions_without_end_are_answered_431(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, ROOMY) as it:
        for endless in (chunks(b" " * 4 * BLOCK, 50, b";x=" + b"a" * 100), b"1;x=" + b"a" * 4 * BLOCK):
            reader, writer = await it.connect(CHUNKED)
            writer.write(endless)
            assert status(await asyncio.wait_for(reader.read(), 30)) == 431
        assert it.refused == {"head_too_large": 2} and not it.pool.submitted


@on_uvloop
async def test_body_of_many_small_chunks_and_few_trailers_is_served(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, ROOMY) as it:
        body = BODY + b" " * 20_000
        data = CHUNKED + chunks(body, 1) + b"0\r\nHost: evil\r\nX-Checksum: 1\r\n\r\n"
        assert status(await it.send(data)) == 200
        assert len(it.pool.submitted) == 1 and not it.refused


@on_uvloop
async def test_trailers_are_no_headers_of_their_request(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, QUICK, api_key="sk-one") as it:
        data = CHUNKED + chunks(BODY, 9) + b"0\r\nAuthorization: Bearer sk-one\r\n\r\n"
        assert status(await it.send(data)) == 401


@on_uvloop
async def test_head_with_too_many_headers_is_answered_431(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, ConnectionLimits()) as it:
        assert status(await it.send(LAST.replace(b"\r\n\r\n", b"\r\n" + b"a:\r\n" * 600 + b"\r\n"))) == 431
        assert it.refused == {"head_too_large": 1}


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("size", [10_000, 7, 1])
@on_uvloop
async def test_upgrade_offer_is_ignored_wherever_it_stands(tokenizer: Tokenizer, offer: bytes, size: int) -> None:
    hello = HELLO.replace(b"Host: x\r\n", b"Host: x\r\n" + offer)
    chunked = CHUNKED.replace(CLOSE, offer) + chunks(BODY, 10) + b"0\r\nX: y\r\n\r\n"
    data = hello + post(head=offer) + HELLO + chunked + hello + post(head=offer) + LAST
    async with case(tokenizer) as it:
        reader, writer = await it.connect()
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            if start % 50 == 0:
                await asyncio.sleep(0)
        assert statuses(await asyncio.wait_for(reader.read(), 60)) == [200] * 7
        assert len(it.pool.submitted) == 3 and not it.refused


@on_uvloop
async def test_body_before_an_upgrade_offer_is_not_read_as_a_request(tokenizer: Tokenizer) -> None:
    inner = b"garbage\r\n\r\n" + post()  # a body whose text is a request
    async with case(tokenizer) as it:
        reader, writer = await it.connect(post(inner)[: -len(inner)])
        await asyncio.sleep(0.05)
        writer.write(inner + HELLO.replace(b"Host: x\r\n", b"Host: x\r\n" + H2C) + LAST)
        assert statuses(await asyncio.wait_for(reader.read(), 60)) == [400, 200, 200]
        assert not it.pool.submitted


@on_uvloop
async def test_ambiguous_request_is_answered_400_once(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answers = await asyncio.gather(*(it.send(data + LAST) for data in AMBIGUOUS))
        assert [(data, statuses(answer)) for data, answer in zip(AMBIGUOUS, answers, strict=True)] == [
            (data, [400]) for data in AMBIGUOUS
        ]
        assert sum(it.refused.values()) == len(AMBIGUOUS) and not it.pool.submitted


@on_uvloop
async def test_http_1_0_needs_no_host_and_is_closed_even_with_keep_alive(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert status(answer) == 200


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://other.example/health", 200),  # the absolute form, as proxies send it
        (b"/%68ealth", 200),
        (b"/health%00", 404),
        (b"/web/..%2f..%2fserver/auth.py", 404),
        (b"/web/%2e%2e/%2e%2e/server/auth.py", 404),
        (b"//health", 404),
        (b"/he%0d%0aX-Evil:%201alth", 404),
        (b"/health?" + b"a" * 3000, 200),
    ],
)  # fmt: skip
@on_uvloop
async def test_target_is_decoded_once_and_reaches_no_file(tokenizer: Tokenizer, target: bytes, expected: int) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(LAST.replace(b"/health", target))
        assert status(answer) == expected and b"X-Evil" not in answer.partition(b"\r\n\r\n")[0]


@on_uvloop
async def test_request_after_close_is_not_served(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        for first in (post(head=CLOSE), LAST, CHUNKED + b"0\r\n\r\n"):
            before = len(it.pool.submitted)
            answer = await it.send(first + post())
            assert len(statuses(answer)) == 1 and len(it.pool.submitted) - before == (first == post(head=CLOSE))


@on_uvloop
async def test_body_that_is_not_of_its_coding_is_refused(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(post(b"\x1f\x8b\x08\0\0\0\0\0", head=b"Content-Encoding: gzip\r\n" + CLOSE))
        assert 400 <= status(answer) < 500 and not it.pool.submitted


@pytest.mark.parametrize("value", [b"a\tb", b"\xff", b"x" * 500, b"<script>", b"a\x85b"])
@on_uvloop
async def test_request_id_that_is_no_plain_word_is_not_reflected(tokenizer: Tokenizer, value: bytes) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(LAST.replace(b"Host: x", b"Host: x\r\nX-Request-Id: " + value))
        assert status(answer) == 200 and value not in answer
