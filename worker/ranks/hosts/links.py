"""TCP connections between ranks. If the other end is gone or unreachable, a connection breaks within BROKEN_S."""

import os
import select
import socket

from worker.ranks.hosts.handshake import HANDSHAKE_S, Caller, greet

BROKEN_S = 10
IDLE_S, PROBES = 5, 5  # after IDLE_S without a byte, TCP sends PROBES keepalive probes, one each second

_OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): IDLE_S,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): (BROKEN_S - IDLE_S) // PROBES,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): PROBES,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): BROKEN_S * 1000,  # ms that sent data may stay unacknowledged
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}


def connect(host: str, port: int, secret: bytes, caller: Caller) -> socket.socket:
    """Connects to a rank, and checks that it has the key. Raises WrongKey, EOFError and OSError."""
    link = socket.create_connection((host, port), HANDSHAKE_S)
    try:
        greet(link, secret, caller)
        prepare(link)
    except BaseException:
        link.close()
        raise
    return link


def prepare(link: socket.socket) -> None:
    """Sets the socket options with which a connection breaks when its other end is gone, and removes the timeout."""
    link.settimeout(None)
    for (level, option), value in _OPTIONS.items():
        link.setsockopt(level, option, value)


def wait_for_end(link: socket.socket, seconds: float | None = None) -> str:
    """Waits until the connection has ended, and returns why; "" if it has not ended within `seconds`. Reads no data."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    if not poll.poll(None if seconds is None else seconds * 1000):
        return ""
    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return f"the connection has broken: {os.strerror(error)}" if error else "the connection was closed"
