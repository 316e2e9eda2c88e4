"""frontend/server/http_protocol.py on raw sockets: slow, silent, greedy and malformed clients."""

import asyncio
import contextlib
import http.client
import inspect
import json
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.server.http_protocol import MAX_PIPELINED, ConnectionLimits, LimitedHttpProtocol
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, sending
from tests.frontend.server.harness import BODY, HELLO, LAST, case, on_uvloop, post, status, statuses
from tests.frontend.serving import until
from tests.patience import PATIENCE_S
from tests.versions import PINNED

# versions whose sources were compared with our overrides
CHECKED_WITH = {"uvicorn": "0.54.0", "sse-starlette": "3.7.0"}


def test_pinned_versions_are_those_that_were_checked() -> None:
    """uvicorn documents neither its protocol nor its server: read both in a new version, then raise CHECKED_WITH."""
    assert {name: PINNED[name] for name in CHECKED_WITH} == CHECKED_WITH


async def test_uvicorn_has_what_the_protocol_and_the_server_override_and_read() -> None:
    config = uvicorn.Config("frontend.app:create_app", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    protocol = HttpToolsProtocol(config, server.server_state, {}, asyncio.get_running_loop())
    read = (
        "parser", "transport", "loop", "connections", "pipeline", "cycle", "scope", "headers", "timeout_keep_alive_task"
    )  # fmt: skip
    callbacks = (
        "connection_made", "connection_lost", "data_received", "eof_received", "on_headers_complete", "on_body",
        "on_message_complete", "on_response_complete", "shutdown",
    )  # fmt: skip
    assert not [name for name in (*read, *callbacks) if not hasattr(protocol, name)]
    cycle = set(inspect.getsource(RequestResponseCycle.__init__).split())
    of_a_cycle = (
        "transport", "flow", "scope", "disconnected", "message_event", "response_started", "response_complete",
        "more_body", "chunked_encoding",
    )  # fmt: skip
    assert not [name for name in of_a_cycle if not {f"self.{name}", f"self.{name}:"} & cycle]
    assert not [name for name in ("startup", "handle_exit", "should_exit", "force_exit") if not hasattr(server, name)]
    assert {"connections", "default_headers"} <= set(vars(server.server_state))


async def trickle(writer: asyncio.StreamWriter, pieces: bytes, pause: float = 0.05) -> None:
    while not writer.is_closing():
        for piece in pieces:
            try:
                writer.write(bytes([piece]))
                await writer.drain()
            except (OSError, RuntimeError):  # uvloop raises RuntimeError for a transport that has just been closed
                return
            await asyncio.sleep(pause)


@on_uvloop
async def test_slow_request_is_answered_408_and_idle_connection_is_closed(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        slow = {
            "head": await it.connect(b"GET /health HTTP/1.1\r\nX-"),
            "second head": await it.connect(HELLO + b"GET /health HTTP/1.1\r\nX-"),
            "body": await it.connect(post(b"{", length=1000)),
            "chunked": await it.connect(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            ),
        }
        # a CR LF between requests is allowed, so it must not count as activity
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
            with contextlib.suppress(ConnectionError):  # a reset comes if the client still sends
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert statuses(answer) == ([200] if name == "after one" else []), name
        assert it.refused == {"request_timeout": 4} and not it.pool.submitted
        for task in trickles:
            task.cancel()
        assert status(await it.send(post(head=b"Connection: close\r\n"))) == 200


@on_uvloop
async def test_client_that_never_reads_is_cut_off_and_its_request_aborted(tokenizer: Tokenizer) -> None:
    def flood(pool: FakePool, stream: Any) -> None:
        def send() -> None:
            pool.send_tokens(stream, [65] * 20_000)
            if stream.end is None:
                pool.later(send, 0.002)

        pool.later(send)

    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 500, "stream": True}).encode()
    async with case(tokenizer, play=flood) as it:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(it.address)
        deaf.sendall(post(body))
        await until(lambda: it.aborted, 20)
        assert it.aborted == {"write_timeout": 1} and it.refused == {"write_timeout": 1}
        assert it.pool.live == 0
        with contextlib.suppress(ConnectionResetError):
            while deaf.recv(1 << 20):
                pass
        deaf.close()


@on_uvloop
async def test_slow_response_hits_no_timeout(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, play=sending([65], [66], pause_s=0.9)) as it:
        assert status(await it.send(post(head=b"Connection: close\r\n"))) == 200
        assert not it.refused


@on_uvloop
async def test_connection_beyond_the_limit_is_answered_503(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, ConnectionLimits(connections=3)) as it:
        held = [await it.connect(HELLO) for _ in range(3)]
        for reader, _ in held:
            await reader.readuntil(b"}")
        answer = await it.send(HELLO)
        assert status(answer) == 503 and b"retry-after" in answer and it.refused == {"too_many_connections": 1}
        held[0][1].close()
        await held[0][1].wait_closed()
        reader, _ = await it.connect(HELLO)
        assert b"200 OK" in await reader.readuntil(b"}")


@on_uvloop
async def test_head_beyond_the_limit_is_answered_431(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        at_once = b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 90) for i in range(60)) + b"\r\n"
        in_the_line = b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        endless = b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 9000
        for data in (at_once, in_the_line, endless):
            assert status(await it.send(data)) == 431
        assert it.refused == {"head_too_large": 3}
        # neither a large body nor the bytes behind it count as a large head
        large = post(json.dumps({"model": "tiny", "prompt": "a" * 400, "max_tokens": 1, "user": "u" * 20_000}).encode())
        assert statuses(await it.send(large + post(head=b"Connection: close\r\n")))[-1] == 200


def coded(codings: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: %b\r\n\r\n" % codings
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", [400]),  # a TLS handshake on a plain port
        (b"GET /health HTTP/9.9\r\n\r\n", [400]),
        (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", [400]),
        (post(head=b"Transfer-Encoding: chunked\r\n"), [400]),  # two contradicting lengths
        (coded(b"chunked"), [200]),
        (coded(b"Chunked"), [200]),
        (coded(b"gzip, chunked"), [501]),
        (coded(b"gzip\r\nTransfer-Encoding: chunked"), [501]),
        (post(head=b"Content-Length: 7\r\n"), [400]),
        (post(length="9" * 30), [400]),
        (post(length="-1"), [400]),
        (post(length="9" * 15, head=b"Connection: close\r\n"), [413]),  # refused without waiting for the body
        (post(length="9" * 15, head=b"Connection: close\r\nExpect: 100-continue\r\n"), [413]),
        (post(head=b"Expect: 100-continue\r\nConnection: close\r\n"), [100, 200]),
        (post(head=b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n"), [200]),
        (HELLO + HELLO + LAST, [200, 200, 200]),
        (post() + b"garbage\r\n\r\n", None),
        (HELLO * 5000, None),
    ],
)  # fmt: skip
@on_uvloop
async def test_malformed_request_is_answered_400_and_the_server_goes_on(
    tokenizer: Tokenizer, data: bytes, expected: list[int] | None
) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(data)
        if expected is not None:
            assert statuses(answer) == expected
        if expected == [400]:
            assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        await until(lambda: it.pool.live == 0)
        assert status(await it.send(LAST)) == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@on_uvloop
async def test_client_with_a_body_too_large_can_read_the_413(tokenizer: Tokenizer, version: bytes) -> None:
    async with case(tokenizer) as it:
        large = post(b" " * (9 << 20), head=b"Connection: close\r\n").replace(b"HTTP/1.1", b"HTTP/" + version, 1)
        assert status(await it.send(large)) == 413 and it.refused == {}


@on_uvloop
async def test_pipelined_request_is_aborted_when_its_client_leaves(tokenizer: Tokenizer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}).encode()
    async with case(tokenizer, ConnectionLimits(), play=sending(*[[65]] * 400, pause_s=0.02)) as it:
        reader, writer = await it.connect(post(body) + HELLO)
        await reader.readuntil(b"data:")
        writer.close()
        await until(lambda: it.aborted == {"client": 1})
        assert it.pool.live == 0


class Wire(asyncio.Transport):
    """A socket of a client that reads at once. What is written is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.ended, self.closed = b"", False, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("half_closed", [False, True])
async def test_pipelined_requests_beyond_the_limit_are_refused_after_the_answers_to_the_others(
    half_closed: bool,
) -> None:
    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})

    config = uvicorn.Config(hello, log_config=None, lifespan="off")
    config.load()
    refused, wire, loop = list[str](), Wire(), asyncio.get_running_loop()
    state = uvicorn.Server(config).server_state
    protocol = LimitedHttpProtocol(ConnectionLimits(), refused.append, config, state, {}, loop)
    protocol.connection_made(wire)
    protocol.data_received(HELLO * (MAX_PIPELINED + 20))
    protocol.data_received(HELLO)
    if half_closed:
        assert protocol.eof_received()
    await until(lambda: wire.ended)
    answered = [one for one in statuses(wire.written) if one != 100]
    assert answered == [200] * (MAX_PIPELINED + 1) + [400] and refused == ["too_many_pipelined"]
    assert json.loads(wire.written.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_pipelined"
    protocol.connection_lost(None)


@on_uvloop
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_last_stream_of_a_connection_says_only_that_it_is_closed(tokenizer: Tokenizer, version: bytes) -> None:
    async with case(tokenizer) as it:
        sent = post(STREAMED, head=b"Connection: close\r\n").replace(b"HTTP/1.1", b"HTTP/" + version, 1)
        head, _, body = (await it.send(sent)).partition(b"\r\n\r\n")
        assert b"[DONE]" in body
        assert [line for line in head.lower().split(b"\r\n") if line.startswith(b"connection:")] == [
            b"connection: close"
        ]


STREAMED = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True}).encode()


@on_uvloop
@pytest.mark.parametrize(
    "sent",
    [post(), post(STREAMED), post() + HELLO, HELLO + post()],
    ids=["whole", "stream", "then health", "after health"],
)
async def test_client_that_sends_no_more_gets_its_answers(tokenizer: Tokenizer, sent: bytes) -> None:
    async with case(tokenizer, play=sending([65], [66], pause_s=0.02)) as it:
        reader, writer = await it.connect(sent)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        found = [each for each in statuses(answer) if each != 100]
        assert found == [200] * sent.count(b"HTTP/1.1") and it.aborted == {}, answer
        assert (b"[DONE]" if b'"stream": true' in sent else b'"completion_tokens":2') in answer, answer


@on_uvloop
async def test_python_client_skips_the_interim_response(tokenizer: Tokenizer) -> None:
    async with case(tokenizer, play=sending([65], [66], pause_s=0.05)) as it:

        def ask() -> tuple[int, bytes]:
            with contextlib.closing(http.client.HTTPConnection(*it.address, timeout=PATIENCE_S)) as connection:
                connection.request("POST", "/v1/completions", BODY)
                connection.sock.shutdown(socket.SHUT_WR)
                with connection.getresponse() as response:
                    return response.status, response.read()

        code, body = await asyncio.to_thread(ask)
        assert code == 200 and b'"completion_tokens":2' in body


@on_uvloop
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_closes_is_gone_though_it_looks_like_one_that_sends_no_more(
    tokenizer: Tokenizer, stream: bool
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": stream}).encode()
    async with case(tokenizer, ConnectionLimits(), play=sending(*[[65]] * 4000, pause_s=0.02)) as it:
        reader, writer = await it.connect(post(body))
        if stream:
            await reader.readuntil(b"data:")
        else:
            await until(lambda: it.pool.live == 1)
        writer.close()
        await until(lambda: it.aborted == {"client": 1})
        assert it.pool.live == 0


@on_uvloop
@pytest.mark.parametrize("sent", [post(b"{", length=99), post().replace(b"HTTP/1.1", b"HTTP/1.0"), b"GET /health HT"])
async def test_end_of_the_input_is_the_end_of_a_client_that_cannot_be_asked(tokenizer: Tokenizer, sent: bytes) -> None:
    async with case(tokenizer, ConnectionLimits(), play=sending(*[[65]] * 4000, pause_s=0.02)) as it:
        reader, writer = await it.connect(sent)
        if sent.endswith(BODY):
            await until(lambda: it.pool.live == 1)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        await until(lambda: it.pool.live == 0)
