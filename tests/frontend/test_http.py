"""What strangers cost, on raw sockets: slow, silent, greedy, deaf and malformed clients."""

import asyncio
import contextlib
import functools
import json
import resource
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from frontend.server.connection_limits import ConnectionLimits, room_for
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakeLink, saying
from tests.frontend.serving import app_over, serving, until
from tests.patience import PATIENCE_S

QUICK = ConnectionLimits(connections=50, header_bytes=4096, request_s=0.6, write_s=0.6, idle_s=1.2)
HELLO = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
BODY = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
SAY_A = saying([65], [66])


@dataclass
class Case:
    """A served app, its link, and what was refused."""

    url: str
    link: FakeLink
    refused: Counter[str]
    aborted: Counter[str]
    writers: list[asyncio.StreamWriter]

    @functools.cached_property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def connect(self, said: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(said)
        return reader, writer

    async def say(self, said: bytes, seconds: float = PATIENCE_S) -> bytes:
        """Everything the server answers until it closes."""
        reader, _ = await self.connect(said)
        try:
            return await asyncio.wait_for(reader.read(), seconds)
        except ConnectionResetError:
            return b""


def post(body: bytes = BODY, head: bytes = b"", length: object = None) -> bytes:
    size = str(len(body) if length is None else length).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + size + b"\r\n" + head + b"\r\n" + body


# what Java's HTTP client sends first
JAVA = post().partition(b"\r\n\r\n")[0] + b"\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The loop that frontends run on; its transports are not asyncio's."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def case(
    tokenizer: Tokenizer, limits: ConnectionLimits = QUICK, play: Any = SAY_A, **config: Any
) -> AsyncIterator[Case]:
    link, refused, aborted = FakeLink(play), Counter[str](), Counter[str]()
    app = app_over(link, tokenizer, **config)
    app.state.service.meter.aborted = lambda reason: aborted.update([reason])
    async with serving(app, limits, lambda code: refused.update([code])) as url:
        it = Case(url, link, refused, aborted, [])
        try:
            yield it
        finally:
            for writer in it.writers:
                writer.close()


async def trickle(writer: asyncio.StreamWriter, pieces: bytes, pause: float = 0.05) -> None:
    while not writer.is_closing():
        for piece in pieces:
            try:
                writer.write(bytes([piece]))
                await writer.drain()
            except (OSError, RuntimeError):  # uvloop's for a transport that has just been closed
                return
            await asyncio.sleep(pause)


@on_uvloop
async def test_trickled_heads_and_bodies_end_in_408_and_silence_in_a_closed_connection(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        slow = {
            "head": await it.connect(b"GET /health HTTP/1.1\r\nX-"),
            "second head": await it.connect(HELLO + b"GET /health HTTP/1.1\r\nX-"),
            "body": await it.connect(post(b"{", length=1000)),
            "chunked": await it.connect(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            ),
        }
        # a CR LF between requests is allowed, so it must not count as life either
        silent = {"nothing": await it.connect(), "newlines": await it.connect(), "after one": await it.connect(HELLO)}
        trickles = [
            asyncio.create_task(trickle(slow["head"][1], b"a")),
            asyncio.create_task(trickle(slow["second head"][1], b"a")),
            asyncio.create_task(trickle(slow["body"][1], b" ")),
            asyncio.create_task(trickle(slow["chunked"][1], b"1\r\n \r\n")),
            asyncio.create_task(trickle(silent["newlines"][1], b"\r\n")),
        ]
        for name, (reader, _) in slow.items():
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert statuses(answer)[-1] == 408, name
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        for name, (reader, _) in silent.items():
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # for who still sends
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert statuses(answer) == ([200] if name == "after one" else []), name
        assert it.refused == {"request_timeout": 4} and not it.link.submitted
        for task in trickles:
            task.cancel()
        assert status(await it.say(post(head=b"Connection: close\r\n"))) == 200


@on_uvloop
async def test_a_client_that_never_reads_is_cut_off_and_its_request_freed(tokenizer: Tokenizer) -> None:
    def flood(link: FakeLink, stream: Any) -> None:
        def say() -> None:
            link.say(stream, [65] * 20_000)
            if stream.end is None:
                link.later(say, 0.002)

        link.later(say)

    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 500, "stream": True}).encode()
    async with case(tokenizer, play=flood) as it:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(it.address)
        deaf.sendall(post(body))
        await until(lambda: it.aborted, 20)
        assert it.aborted == {"write_timeout": 1} and it.refused == {"write_timeout": 1}
        assert it.link.live == 0
        with contextlib.suppress(ConnectionResetError):
            while deaf.recv(1 << 20):
                pass
        deaf.close()


@on_uvloop
async def test_a_slow_answer_is_no_slow_client(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, play=saying([65], [66], pause_s=0.9)) as it:
        assert status(await it.say(post(head=b"Connection: close\r\n"))) == 200
        assert not it.refused


@on_uvloop
async def test_only_so_many_connections(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, ConnectionLimits(connections=3)) as it:
        held = [await it.connect(HELLO) for _ in range(3)]
        for reader, _ in held:
            await reader.readuntil(b"}")
        answer = await it.say(HELLO)
        assert status(answer) == 503 and b"retry-after" in answer and it.refused == {"too_many_connections": 1}
        held[0][1].close()
        await held[0][1].wait_closed()
        reader, _ = await it.connect(HELLO)
        assert b"200 OK" in await reader.readuntil(b"}")


@on_uvloop
async def test_heads_are_bounded_however_they_arrive(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        at_once = b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 90) for i in range(60)) + b"\r\n"
        in_the_line = b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        endless = b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 9000
        for said in (at_once, in_the_line, endless):
            assert status(await it.say(said)) == 431
        assert it.refused == {"head_too_large": 3}
        # a large body is no large head, nor is what follows it
        large = post(json.dumps({"model": "tiny", "prompt": "a" * 400, "max_tokens": 1, "user": "u" * 20_000}).encode())
        assert statuses(await it.say(large + post(head=b"Connection: close\r\n")))[-1] == 200


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", [400]),  # TLS to a plain port
        (b"GET /health HTTP/9.9\r\n\r\n", [400]),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (post(head=b"Transfer-Encoding: chunked\r\n"), [400]),  # which of both lengths is true?
        (post(head=b"Content-Length: 7\r\n"), [400]),
        (post(length="9" * 30), [400]),
        (post(length="-1"), [400]),
        (post(length="9" * 15, head=b"Connection: close\r\n"), [413]),  # without waiting for it
        (post(length="9" * 15, head=b"Connection: close\r\nExpect: 100-continue\r\n"), [413]),
        (post(head=b"Expect: 100-continue\r\nConnection: close\r\n"), [100, 200]),
        (post(head=b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n"), [200]),
        (JAVA + b"Connection: Upgrade, HTTP2-Settings\r\n\r\n" + BODY + LAST, [200, 200]),
        (HELLO + HELLO + LAST, [200, 200, 200]),
        (post() + b"garbage\r\n\r\n", None),
        (HELLO * 5000, None),
    ],
)  # fmt: skip
@on_uvloop
async def test_odd_requests_have_sane_answers(tokenizer: Tokenizer, said: bytes, expected: list[int] | None) -> None:
    async with case(tokenizer) as it:
        answer = await it.say(said)
        if expected is not None:
            assert statuses(answer) == expected
        if expected == [400]:
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        await until(lambda: it.link.live == 0)
        assert status(await it.say(LAST)) == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@on_uvloop
async def test_who_says_too_much_at_once_can_read_why(tokenizer: Tokenizer, version: bytes) -> None:
    async with case(tokenizer) as it:
        large = post(b" " * (9 << 20), head=b"Connection: close\r\n").replace(b"HTTP/1.1", b"HTTP/" + version, 1)
        assert status(await it.say(large)) == 413 and it.refused == {}


@on_uvloop
async def test_a_client_that_asks_twice_and_leaves_stops_the_first_request_too(tokenizer: Tokenizer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}).encode()
    async with case(tokenizer, ConnectionLimits(), play=saying(*[[65]] * 400, pause_s=0.02)) as it:
        reader, writer = await it.connect(post(body) + HELLO)
        await reader.readuntil(b"data:")
        writer.close()
        await until(lambda: it.aborted == {"client": 1})
        assert it.link.live == 0


@on_uvloop
async def test_http_1_0_gets_an_answer_and_a_closed_connection(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answer = await it.say(post().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert status(answer) == 200 and b"chunked" not in answer
        streamed = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}).encode()
        answer = await it.say(post(streamed).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head and body.startswith(b"data:") and body.endswith(b"data: [DONE]\n\n")


def test_open_files_are_raised_to_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 128), before[1]))
        assert room_for(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        assert room_for(1 << 40) < 1 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1 with its key."""
    file = folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = subprocess.run([*command, "-keyout", "-"], check=True, capture_output=True)
    file.write_bytes(made.stdout)
    return file


def over_tls(url: str, certificate: Path, said: bytes) -> tuple[ssl.SSLSocket, bytes]:
    """A connection as a client's pool keeps it: nobody looks at it once the answer is there."""
    host, port = url.removeprefix("https://").split(":")
    trust = ssl.create_default_context(cafile=certificate)
    connection = trust.wrap_socket(socket.create_connection((host, int(port)), 10), server_hostname=host)
    connection.sendall(said)
    return connection, connection.recv(1 << 16) if said else b""


@on_uvloop
async def test_a_connection_that_is_kept_for_later_ends_with_the_server_over_tls_too(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, app = self_signed(tmp_path), app_over(FakeLink(SAY_A), tokenizer)
    with contextlib.ExitStack() as clients:

        async def connect(url: str, said: bytes) -> tuple[ssl.SSLSocket, bytes]:
            connection, answer = await asyncio.to_thread(over_tls, url, certificate, said)
            return clients.enter_context(connection), answer

        async with serving(app, QUICK, certificate=certificate) as url:
            kept, answer = await connect(url, HELLO)
            unused, _ = await connect(url, b"")
            last, _ = await connect(url, LAST)
            assert status(answer) == 200
        assert not [record.message for record in caplog.records if "graceful" in record.message]
        for connection in (kept, unused, last):
            while await asyncio.to_thread(connection.recv, 1 << 16):
                pass  # what was left of the last answer, and then the end, not a reset
