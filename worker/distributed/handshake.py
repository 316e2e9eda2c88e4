"""Connections between hosts, and the listener for them: both ends prove that they have the worker's key, without
sending it.

The connecting end sends its identity and a nonce. The listening end answers with its own nonce and an HMAC-SHA-256 over
all of this. Then the connecting end sends an HMAC, too. Both HMACs differ, so neither can be replayed to its sender. No
message is decoded before the handshake, and nothing is encrypted after it: see docs/security.md.
"""

import hashlib
import hmac
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from shared.config.declaration import ConfigError

ORDERS, ROWS = 1, 2  # purposes of a connection: orders from rank 0 to another rank; rows that two ranks exchange
GREETING = struct.Struct("<16s32sBB16s")
PROTOCOL = b"sluice ranks 1".ljust(16, b"\0")
NONCE = PROOF = 32
NO_GROUP = bytes(16)
HANDSHAKE_S = 5.0


class WrongKey(Exception):
    """The other end does not have the worker's key."""


class HandshakeRefused(Exception):
    """The other end is not a rank of this version of the program."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of the connecting rank. group: the random name that rank 0 gave the group; before that, NO_GROUP."""

    purpose: int
    rank: int
    group: bytes = NO_GROUP


def greet(link: socket.socket, secret: bytes, identity: Identity) -> None:
    """The connecting end's side of the handshake. Raises WrongKey, EOFError and OSError."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = GREETING.pack(PROTOCOL, os.urandom(NONCE), identity.purpose, identity.rank, identity.group)
    link.sendall(greeting)
    answer = _exactly(link, NONCE + PROOF, deadline)
    nonce, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listens", greeting, nonce)):
        raise WrongKey
    link.sendall(_proof(secret, b"connects", greeting, nonce))


def admit(link: socket.socket, secret: bytes) -> Identity:
    """The listening end's side. Returns the rank that connected.

    Raises HandshakeRefused, WrongKey, EOFError and OSError.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    greeting, nonce = _exactly(link, GREETING.size, deadline), os.urandom(NONCE)
    protocol, _, purpose, rank, group = GREETING.unpack(greeting)
    if protocol != PROTOCOL or purpose not in (ORDERS, ROWS):
        raise HandshakeRefused
    link.sendall(nonce + _proof(secret, b"listens", greeting, nonce))
    if not hmac.compare_digest(_exactly(link, PROOF, deadline), _proof(secret, b"connects", greeting, nonce)):
        raise WrongKey
    return Identity(purpose, rank, group)


def _proof(secret: bytes, end: bytes, greeting: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, end + greeting + nonce, hashlib.sha256)


def _exactly(link: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# Listens on a port for connections of other ranks, and accepts those that prove to have the worker's key.

log = logging.getLogger("sluice.ranks")
MOST_AT_ONCE = 16  # handshakes at the same time; a silent connection occupies a place for HANDSHAKE_S
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank whose connection was accepted. address: the rank's IP address, as this machine sees it."""

    identity: Identity
    link: socket.socket
    address: str


class Listener:
    """Listens during a `with` block. At its end, accepted connections that next() has not returned are closed."""

    def __init__(self, port: int, secret: bytes) -> None:
        """Listens on all addresses of this machine. Raises ConfigError."""
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"--rank-port: cannot listen on port {port}: {error.strerror}") from error
        self._secret = secret
        self._peers: queue.Queue[Peer] = queue.Queue()
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._closed = False
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept() of the listening thread
        self._listener.close()
        while not self._peers.empty():
            self._peers.get().link.close()

    def next(self, seconds: float) -> Peer | None:
        """Waits for the next rank that is accepted, and returns it; None if there is none within `seconds`."""
        try:
            return self._peers.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while not self._closed:
            try:
                link, address = self._listener.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                threading.Thread(
                    target=self._admit, args=(link, _plain(address[0])), name="listener", daemon=True
                ).start()
            else:
                link.close()

    def _admit(self, link: socket.socket, address: str) -> None:
        try:
            identity = admit(link, self._secret)
            prepare(link)
        except WrongKey:
            log.warning("refused a rank at %s: it has another key in --curve-dir", address)
        except HandshakeRefused:
            log.warning("refused a connection from %s: it is no rank of this version", address)
        except (OSError, EOFError):
            pass  # the other end has closed the connection, or did not finish the handshake in time
        else:
            self._peers.put(Peer(identity, link, address))
            if self._closed:
                link.close()
            return
        finally:
            self._places.release()
        link.close()


def _plain(address: str) -> str:
    """Returns an IPv4 address without the prefix that a dual-stack socket puts before it."""
    return address.removeprefix("::ffff:")


# TCP connections between ranks. If the other end is gone or unreachable, a connection breaks within BROKEN_S.

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


def connect(host: str, port: int, secret: bytes, identity: Identity) -> socket.socket:
    """Connects to a rank, and checks that it has the key. Raises WrongKey, EOFError and OSError."""
    link = socket.create_connection((host, port), HANDSHAKE_S)
    try:
        greet(link, secret, identity)
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
