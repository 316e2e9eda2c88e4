"""Who may connect over tcp://: answers ZeroMQ's request to authenticate the key of each new connection (ZAP, RFC 27).

Lives in the I/O thread. The folder of allowed keys is read at every request, so that a key counts from the moment its
file is there. ZeroMQ asks only once a connection: later messages of a key whose file has gone are dropped (`knows`).
"""

import logging
from dataclasses import dataclass, field

import zmq

from shared.config import WireConfig
from shared.curve import allowed_keys

log = logging.getLogger("sluice.link")

ENDPOINT = "inproc://zeromq.zap.01"
NAMED = 64  # most refused keys whose first refusal is logged


@dataclass(slots=True)
class Authenticator:
    """`refused` counts. Open it before the sockets that it guards are bound."""

    wire: WireConfig
    socket: zmq.Socket[bytes]
    refused: int = 0
    _allowed: set[str] = field(default_factory=set)  # as of the last `refresh`
    _named: set[bytes] = field(default_factory=set)

    @classmethod
    def open(cls, context: zmq.Context[zmq.Socket[bytes]], wire: WireConfig) -> "Authenticator | None":
        """None where nobody is asked for a key."""
        if wire.insecure or not wire.requests.startswith("tcp://"):
            return None
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        return cls(wire, socket)

    def refresh(self) -> None:
        """Reads the folder; called a few times a second."""
        self._allowed = {key.decode() for key in allowed_keys(self.wire)}

    def knows(self, frames: list[zmq.Frame]) -> bool:
        """Whether the key that a message came with may still speak."""
        try:
            known = bool(frames) and frames[-1].get("User-Id") in self._allowed
        except zmq.ZMQError:
            known = False
        self.refused += not known
        return known

    def answer(self) -> None:
        """Answers all requests of ZeroMQ's that are there."""
        from zmq.utils import z85

        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            self.refresh()
            known = key.decode() in self._allowed
            if not known:
                self._refuse(key, address.decode("ascii", "replace"))
            # 300: the greeting runs into its time limit, and the peer tries again; after 400 it never would
            verdict = (b"200", b"OK", key) if known else (b"300", b"unknown key", b"")
            self.socket.send_multipart((version, request, *verdict, b""))

    def _refuse(self, key: bytes, address: str) -> None:
        self.refused += 1
        if key not in self._named and len(self._named) < NAMED:
            self._named.add(key)
            log.warning("refused %s: its public key %s is not in --curve-dir's folder allowed", address, key.decode())
