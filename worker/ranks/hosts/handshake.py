"""How both ends of a connection prove that they have the worker's key, without sending it.

The end that connects says who it is, with a random number. The end that listens answers with a number of its own and an
HMAC-SHA-256 over all of this; the other end then sends one, too. The two differ, so that none can be sent back. Nothing
is decoded before that, and nothing is encrypted after it: see docs/security.md.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass

ORDERS, ROWS = 1, 2  # what a connection is for: what rank 0 tells another rank; rows that two ranks exchange
GREETING = struct.Struct("<16s32sBB16s")
PROTOCOL = b"sluice ranks 1".ljust(16, b"\0")
NONCE = PROOF = 32
NO_GROUP = bytes(16)
HANDSHAKE_S = 5.0


class WrongKey(Exception):
    """The other end does not have the worker's key."""


class Stranger(Exception):
    """The other end is none of our ranks, or of another version."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The rank that has connected. group: the name that rank 0 gave to all ranks, once they had come; else NO_GROUP."""

    purpose: int
    rank: int
    group: bytes = NO_GROUP


def greet(link: socket.socket, secret: bytes, caller: Caller) -> None:
    """Proves to the end that listens who this end is. Raises WrongKey, EOFError and OSError."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = GREETING.pack(PROTOCOL, os.urandom(NONCE), caller.purpose, caller.rank, caller.group)
    link.sendall(greeting)
    answer = _exactly(link, NONCE + PROOF, deadline)
    nonce, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listens", greeting, nonce)):
        raise WrongKey
    link.sendall(_proof(secret, b"connects", greeting, nonce))


def admit(link: socket.socket, secret: bytes) -> Caller:
    """Returns who has connected, and has proved it. Raises Stranger, WrongKey, EOFError and OSError."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting, nonce = _exactly(link, GREETING.size, deadline), os.urandom(NONCE)
    protocol, _, purpose, rank, group = GREETING.unpack(greeting)
    if protocol != PROTOCOL or purpose not in (ORDERS, ROWS):
        raise Stranger
    link.sendall(nonce + _proof(secret, b"listens", greeting, nonce))
    if not hmac.compare_digest(_exactly(link, PROOF, deadline), _proof(secret, b"connects", greeting, nonce)):
        raise WrongKey
    return Caller(purpose, rank, group)


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
