"""Authenticates connections over tcp://. ZeroMQ asks this module to check each connection's public key (ZAP, RFC 27).

It runs in the I/O thread. It reads the folder of allowed keys for every check, so that a key is valid as soon as its
file exists. ZeroMQ asks only once per connection. If the file of a key is removed later, `is_allowed` rejects the
messages that still arrive over that connection.
"""

import logging
from dataclasses import dataclass, field

import zmq

from shared.config import WireConfig
from shared.wire.curve import allowed_keys

log = logging.getLogger("sluice.transport")

ENDPOINT = "inproc://zeromq.zap.01"
MAX_LOGGED = 64  # how many refused keys are logged, each only once


@dataclass(slots=True)
class Authenticator:
    """Checks the keys of connections. Must be opened before the sockets that it protects are bound."""

    wire: WireConfig
    socket: zmq.Socket[bytes]
    refused: int = 0  # number of refused connections and messages
    _allowed: set[str] = field(default_factory=set)  # the allowed keys at the last refresh()
    _logged: set[bytes] = field(default_factory=set)

    @classmethod
    def open(cls, context: zmq.Context[zmq.Socket[bytes]], wire: WireConfig) -> "Authenticator | None":
        """Opens an authenticator. Returns None if the settings require no keys."""
        if wire.insecure or not wire.requests.startswith("tcp://"):
            return None
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        return cls(wire, socket)

    def refresh(self) -> None:
        """Reads the folder of allowed keys. Called a few times a second."""
        self._allowed = {key.decode() for key in allowed_keys(self.wire)}

    def is_allowed(self, frames: list[zmq.Frame]) -> bool:
        """Whether the key of the connection that delivered this message is still allowed."""
        try:
            allowed = bool(frames) and frames[-1].get("User-Id") in self._allowed
        except zmq.ZMQError:
            allowed = False
        self.refused += not allowed
        return allowed

    def answer(self) -> None:
        """Answers all pending requests of ZeroMQ to check a key."""
        from zmq.utils import z85

        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            self.refresh()
            allowed = key.decode() in self._allowed
            if not allowed:
                self._refuse(key, address.decode("ascii", "replace"))
            # After status 300, the handshake times out and the peer retries; after 400, it would not retry.
            verdict = (b"200", b"OK", key) if allowed else (b"300", b"unknown key", b"")
            self.socket.send_multipart((version, request, *verdict, b""))

    def _refuse(self, key: bytes, address: str) -> None:
        self.refused += 1
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            log.warning(
                "refused %s: its public key %s is not in the folder allowed/ of --curve-dir", address, key.decode()
            )
