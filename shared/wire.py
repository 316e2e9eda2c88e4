"""ZeroMQ sockets with the options of both ends: sends never block, drops are detected, peers are authenticated.

Knows addresses and options; nothing of messages. The path of an ipc:// socket lies in a folder that only its owner may
enter; tcp:// needs CURVE keys (curve.py) unless `insecure`.
"""

import os
import stat
from pathlib import Path

import zmq

from shared.config import ConfigError, WireConfig
from shared.wire.curve import keys_for

HANDSHAKE_MS = 3000  # limit of the CURVE handshake; a rejected peer is disconnected after this time and tries again
CONNECT_MS = 3000  # limit of a TCP connection attempt; without it, the system's pauses between attempts grow to minutes
MAX_MESSAGE_BYTES = 64 << 20  # a peer that sends a larger message is disconnected
HIGH_WATER = 100_000  # maximum frames queued for a peer; beyond it, sends to the peer fail
MAX_SOCKETS = 65_535  # sockets of a context: libzmq's maximum. Its default of 1,023 is too few for 512 workers
PING_TIMEOUT_MS = 15_000  # a peer that answers no pings is disconnected, because frames queued for it would fill memory


def large_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Returns a context for the sockets of many peers (half a megabyte of memory)."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return made


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, wire: WireConfig, *, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """Returns a socket that keeps trying to reach `address`; without a connection, sends fail with zmq.Again."""
    sock = _socket(context, kind)
    if identity:
        sock.setsockopt(zmq.IDENTITY, identity)
    if kind != zmq.SUB:  # on SUB, the option would discard unread messages of a worker that closes
        sock.setsockopt(zmq.IMMEDIATE, 1)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    sock.setsockopt(zmq.TCP_MAXRT, CONNECT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    _secure(sock, address, wire, server=False)
    sock.connect(address)
    return sock


def bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, wire: WireConfig) -> zmq.Socket[bytes]:
    """Returns a bound socket.

    Raises:
        ConfigError: the address cannot be bound, or others may connect to it.
    """
    if address.startswith("ipc://"):
        _private_folder(Path(address.removeprefix("ipc://")).parent)
    sock = _socket(context, kind)
    try:
        _secure(sock, address, wire, server=True)
        sock.bind(address)
    except zmq.ZMQError as error:
        sock.close(linger=0)
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    except ConfigError:
        sock.close(linger=0)
        raise
    return sock


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.XPUB:
        sock.setsockopt(zmq.XPUB_NODROP, 1)
        sock.setsockopt(zmq.XPUB_VERBOSER, 1)
    return sock


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"the socket folder {folder} must belong to this user with mode 0700")


def _secure(sock: zmq.Socket[bytes], address: str, wire: WireConfig, *, server: bool) -> None:
    keys = keys_for(address, wire, worker=server)
    if keys is None:
        return
    sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if server:
        sock.curve_server = True
        sock.setsockopt(zmq.ZAP_DOMAIN, b"sluice")  # worker/transport/auth.py checks every key
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no peer may connect without an authenticator
    else:
        sock.curve_serverkey = keys.worker
