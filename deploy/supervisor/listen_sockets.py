"""The listening sockets of one port: one per frontend, all opened and held by the launcher.

The kernel distributes new connections over the sockets. The launcher keeps them open, so connections to a frontend that
died wait in its socket's queue until it is restarted.
"""

import errno
import os
import socket


class ListenError(Exception):
    """The port cannot be opened; the message is one sentence that says why."""


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Opens `count` sockets that listen on the same port; port 0 picks a free one. Raises ListenError."""
    family, address = _resolve(host, port)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            _bind(probe, address, shared=False)  # fails if any process has the port, even a process that shares it
        sockets: list[socket.socket] = []
        for _ in range(count):
            sockets.append(_listening(family, (address[0], sockets[0].getsockname()[1]) if sockets else address))
        return sockets
    except OSError as error:
        raise ListenError(_reason(error, host, port)) from error


def is_taken(host: str, port: int) -> bool:
    """Whether `listen` would fail on this port."""
    try:
        for listener in listen(host, port):
            listener.close()
    except ListenError:
        return True
    return False


def url(listener: socket.socket, *, secure: bool = False) -> str:
    """Returns the URL under which a browser on this machine reaches a listening socket."""
    scheme = "https" if secure else "http"
    host, port = reachable(listener)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Returns the address for connecting to a listening socket: 0.0.0.0 and :: become loopback."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except UnicodeError as error:
        raise ListenError(f"cannot listen on --host {host}: that is not a host name") from error
    except OSError as error:
        raise ListenError(f"cannot listen on --host {host}: {error.strerror or error}") from error
    return info[0], (str(info[4][0]), port)


def _listening(family: int, address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(listener, address, shared=True)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(target: socket.socket, address: tuple[str, int], *, shared: bool) -> None:
    target.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        target.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    target.bind(address)


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is already in use (on {host}; stop the process that has it, or choose another with --port)"
    return f"cannot listen on {host} port {port}: {os.strerror(error.errno) if error.errno else error}"
