"""Support for HTTP/1.0, for clients that offer HTTP/2, that half-close, and TLS clients that send no close_notify."""

import asyncio
import contextlib
import fcntl
import select
import termios
from collections.abc import Callable, Iterable
from typing import Protocol

CLOSE_NOTIFY_S = 0.05  # pause between two checks whether a TLS client has received everything
GONE_S = (0.001, 0.01, 0.1, 0.5)  # pauses between checks whether a client that sends no more is gone; the last repeats
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients skip it wherever it comes; the host of a closed socket refuses it
UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class Writer(Protocol):
    """The part of a transport that a response needs."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool: ...


class Http10Transport:
    """A transport for a response to HTTP/1.0. It removes chunked encoding, so the end of the connection ends the
    body."""

    def __init__(self, transport: Writer) -> None:
        self._transport = transport
        self._chunked: bool | None = None  # None: the head is not written yet
        self.close, self.is_closing = transport.close, transport.is_closing

    def write(self, data: bytes) -> None:
        """Writes the head, or one encoded chunk. The empty last chunk is dropped."""
        if self._chunked is None:
            head = data.replace(b"transfer-encoding: chunked\r\n", b"")
            self._chunked = head != data
            self._transport.write(head)
        elif not self._chunked:
            self._transport.write(data)
        elif data:
            size, _, rest = data.partition(b"\r\n")
            self._transport.write(rest[: int(size, 16)])


def offers_websocket(method: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request that offers another protocol offers a WebSocket."""
    return method == b"GET" and any(name == b"upgrade" and value.lower() == b"websocket" for name, value in headers)


def head_without_upgrade(method: bytes, url: bytes, version: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of a request without its offer to use another protocol.

    For example, Java's HTTP client offers HTTP/2 (h2c) with its first request.
    """
    headers = list(headers)
    lines = [b"%s: %s" % (name, value) for name, value in headers if name not in UPGRADE_HEADERS]
    if any(name == b"connection" and b"close" in value.lower() for name, value in headers):
        lines.append(b"connection: close")
    return b"\r\n".join((b" ".join((method, url, b"HTTP/" + version)), *lines, b"", b""))


def abort_when_gone(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, is_open: Callable[[], bool]) -> None:
    """Ends a connection whose client sends no more, as soon as the client's host has refused what was written.

    A client that has closed its socket and one that only sends no more look the same until something is written.
    Nothing of an event loop notices the refusal, because the end of the input has been read already.
    """
    pauses = iter(GONE_S)

    def check() -> None:
        if not is_open():
            return
        if _is_refused(transport):
            transport.abort()
        else:
            loop.call_later(next(pauses, GONE_S[-1]), check)

    loop.call_later(next(pauses), check)


def _is_refused(transport: asyncio.Transport) -> bool:
    polled = select.poll()
    try:
        polled.register(transport.get_extra_info("socket").fileno(), 0)  # errors are always reported
        return bool(polled.poll(0))
    except (OSError, ValueError):  # the socket was closed meanwhile
        return True


def abort_after_tls_close(
    transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, is_open: Callable[[], bool]
) -> None:
    """Ends a closing TLS connection once the client has received everything, without waiting for its close_notify.

    Some clients keep connections open when idle, and never send a close_notify. Does nothing if `transport` is not
    closing or has no TLS.
    """
    if not transport.is_closing() or transport.can_write_eof():
        return

    def check() -> None:
        if not is_open():
            return
        if _has_unsent(transport):
            loop.call_later(CLOSE_NOTIFY_S, check)
        else:
            transport.abort()

    loop.call_later(CLOSE_NOTIFY_S, check)


def _has_unsent(transport: asyncio.Transport) -> bool:
    """Whether the client's system has not yet acknowledged all written bytes; False without a connection."""
    unsent, socket = bytearray(4), transport.get_extra_info("socket")
    if socket is None:  # the TLS layer has already closed the connection
        return False
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, unsent)
    return any(unsent)
