"""TCP connections between ranks. One whose other end is gone, or cannot be reached, breaks after at most BROKEN_S."""

import os
import select
import socket

from worker.ranks.hosts.handshake import HANDSHAKE_S, Caller, greet

BROKEN_S = 10
IDLE_S, PROBES = 5, 5  # after IDLE_S without a byte, a probe each second

_OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): IDLE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): (BROKEN_S - IDLE_S) // PROBES,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): PROBES,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): BROKEN_S * 1000,  # for what was sent and is not confirmed
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}


def connect(host: str, port: int, secret: bytes, caller: Caller) -> socket.socket:
    """Returns a connection whose other end has the key. Raises WrongKey, EOFError and OSError."""
    link = socket.create_connection((host, port), HANDSHAKE_S)
    try:
        greet(link, secret, caller)
        prepare(link)
    except BaseException:
        link.close()
        raise
    return link


def prepare(link: socket.socket) -> None:
    """Makes the connection notice when its other end is gone, and waits for it as long as it is there."""
    link.settimeout(None)
    for (level, option), value in _OPTIONS.items():
        link.setsockopt(level, option, value)


def wait_for_end(link: socket.socket, seconds: float | None = None) -> str:
    """Waits until the connection has ended, and returns why; after `seconds` an empty text. Reads nothing from it."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    if not poll.poll(None if seconds is None else seconds * 1000):
        return ""
    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return f"the connection has broken: {os.strerror(error)}" if error else "the connection was closed"
