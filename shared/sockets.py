"""ZeroMQ sockets as both ends want them: never blocking, never dropping silently, closed to strangers.

Knows addresses and options; nothing of messages. ipc:// paths lie in a folder only its owner may enter;
tcp:// needs CURVE keys (curve.py) unless `insecure`.
"""

import os
import stat
from pathlib import Path

import zmq

from shared.config import ConfigError, WireConfig
from shared.curve import keys_for

GREETING_MS = 3000  # for two ends to agree on keys; who was refused is hung up on then, and tries again
REACH_MS = 3000  # for an answer from another host; the system's own patience doubles, to minutes between two attempts
HIGH_WATER = 100_000  # frames; beyond it a peer counts as lagging
SILENT_MS = 15_000  # a peer that does not even answer pings is disconnected: what waits for it would fill the memory


def connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, wire: WireConfig, *, identity: bytes = b""
) -> zmq.Socket[bytes]:
    """A socket that keeps trying to reach `address`; sends fail with zmq.Again while nobody is there."""
    sock = _socket(context, kind)
    if identity:
        sock.setsockopt(zmq.IDENTITY, identity)
    if kind != zmq.SUB:  # there, it would throw away what a worker said last, when its end closes before that is read
        sock.setsockopt(zmq.IMMEDIATE, 1)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, REACH_MS)
    sock.setsockopt(zmq.TCP_MAXRT, REACH_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    _secure(sock, address, wire, server=False)
    sock.connect(address)
    return sock


def bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, wire: WireConfig) -> zmq.Socket[bytes]:
    """A bound socket.

    Raises:
        ConfigError: the address cannot be bound or is open to strangers.
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
    sock.setsockopt(zmq.MAXMSGSIZE, (16 if kind == zmq.ROUTER else 64) << 20)
    sock.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if kind == zmq.XPUB:
        sock.setsockopt(zmq.XPUB_NODROP, 1)
        sock.setsockopt(zmq.XPUB_VERBOSER, 1)
    return sock


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise ConfigError(f"the socket folder {folder} must belong to this user with mode 0700")


def _secure(sock: zmq.Socket[bytes], address: str, wire: WireConfig, *, server: bool) -> None:
    keys = keys_for(address, wire, worker=server)
    if keys is None:
        return
    sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret
    sock.setsockopt(zmq.HANDSHAKE_IVL, GREETING_MS)
    if server:
        sock.curve_server = True
        sock.setsockopt(zmq.ZAP_DOMAIN, b"sluice")  # asks worker/transport/auth.py about every key,
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # and lets nobody in should it not be there
    else:
        sock.curve_serverkey = keys.worker
