"""frontend/server/http_compat.py on raw sockets."""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from frontend.server.http_compat import CLOSE_NOTIFY_S, abort_after_tls_close, head_without_upgrade
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.server.harness import BODY, HELLO, LAST, QUICK, SAY_A, case, on_uvloop, post, status, statuses
from tests.frontend.serving import app_over, serving

# the first request of Java's HTTP client, which offers HTTP/2
JAVA = post().partition(b"\r\n\r\n")[0] + b"\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@on_uvloop
async def test_upgrade_offer_is_ignored_and_the_body_read(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(JAVA + b"Connection: Upgrade, HTTP2-Settings\r\n\r\n" + BODY + LAST)
        assert statuses(answer) == [200, 200]
        assert it.pool.live == 0


def test_head_without_upgrade_keeps_the_wish_to_close() -> None:
    headers = [(b"host", b"x"), (b"connection", b"Upgrade, close"), (b"upgrade", b"h2c"), (b"http2-settings", b"AA")]
    head = head_without_upgrade(b"GET", b"/a", b"1.1", headers)
    assert head == b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@on_uvloop
async def test_http_1_0_response_has_no_chunks_and_ends_with_the_connection(tokenizer: Tokenizer) -> None:
    async with case(tokenizer) as it:
        answer = await it.send(post().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert status(answer) == 200 and b"chunked" not in answer
        streamed = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}).encode()
        answer = await it.send(post(streamed).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head and body.startswith(b"data:") and body.endswith(b"data: [DONE]\n\n")


def self_signed(folder: Path) -> Path:
    """Makes a certificate for 127.0.0.1 with its key."""
    file = folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = subprocess.run([*command, "-keyout", "-"], check=True, capture_output=True)
    file.write_bytes(made.stdout)
    return file


def over_tls(url: str, certificate: Path, data: bytes) -> tuple[ssl.SSLSocket, bytes]:
    """Opens a connection over TLS, sends `data`, and returns the connection with the first piece of the answer."""
    host, port = url.removeprefix("https://").split(":")
    trust = ssl.create_default_context(cafile=certificate)
    connection = trust.wrap_socket(socket.create_connection((host, int(port)), 10), server_hostname=host)
    connection.sendall(data)
    return connection, connection.recv(1 << 16) if data else b""


@on_uvloop
async def test_idle_tls_connection_does_not_delay_the_shutdown(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, app = self_signed(tmp_path), app_over(FakePool(SAY_A), tokenizer)
    with contextlib.ExitStack() as clients:

        async def connect(url: str, data: bytes) -> tuple[ssl.SSLSocket, bytes]:
            connection, answer = await asyncio.to_thread(over_tls, url, certificate, data)
            return clients.enter_context(connection), answer

        async with serving(app, QUICK, certificate=certificate) as url:
            kept, answer = await connect(url, HELLO)
            unused, _ = await connect(url, b"")
            last, _ = await connect(url, LAST)
            assert status(answer) == 200
        assert not [record.message for record in caplog.records if "graceful" in record.message]
        for connection in (kept, unused, last):
            while await asyncio.to_thread(connection.recv, 1 << 16):
                pass  # reads the rest of the last answer and then the end, not a reset


async def test_tls_connection_that_ends_by_itself_is_aborted_without_an_error() -> None:
    class Ended(asyncio.Transport):
        """A TLS transport whose connection is gone, in the state that uvloop leaves."""

        aborted = False

        def is_closing(self) -> bool:
            return True

        def can_write_eof(self) -> bool:
            return False

        def abort(self) -> None:
            self.aborted = True

    transport, errors, loop = Ended(), list[object](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    abort_after_tls_close(transport, loop, lambda: True)
    await asyncio.sleep(3 * CLOSE_NOTIFY_S)
    assert transport.aborted and not errors
