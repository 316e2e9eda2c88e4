"""A handshake by which both ends of a connection prove that they have the worker's key, without sending it.

The connecting end sends its identity and a nonce. The listening end answers with its own nonce and an HMAC-SHA-256 over
all of this. Then the connecting end sends an HMAC, too. Both HMACs differ, so neither can be replayed to its sender. No
message is decoded before the handshake, and nothing is encrypted after it: see docs/security.md.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass

ORDERS, ROWS = 1, 2  # purposes of a connection: orders from rank 0 to another rank; rows that two ranks exchange
GREETING = struct.Struct("<16s32sBB16s")
PROTOCOL = b"sluice ranks 1".ljust(16, b"\0")
NONCE = PROOF = 32
NO_GROUP = bytes(16)
HANDSHAKE_S = 5.0


class WrongKey(Exception):
    """The other end does not have the worker's key."""


class Stranger(Exception):
    """The other end is not a rank of this version of the program."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of the connecting rank. group: the random name that rank 0 gave the group; before that, NO_GROUP."""

    purpose: int
    rank: int
    group: bytes = NO_GROUP


def greet(link: socket.socket, secret: bytes, caller: Caller) -> None:
    """The connecting end's side of the handshake. Raises WrongKey, EOFError and OSError."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = GREETING.pack(PROTOCOL, os.urandom(NONCE), caller.purpose, caller.rank, caller.group)
    link.sendall(greeting)
    answer = _exactly(link, NONCE + PROOF, deadline)
    nonce, proof = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listens", greeting, nonce)):
        raise WrongKey
    link.sendall(_proof(secret, b"connects", greeting, nonce))


def admit(link: socket.socket, secret: bytes) -> Caller:
    """The listening end's side. Returns the rank that connected. Raises Stranger, WrongKey, EOFError and OSError."""
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
