"""ZeroMQ sockets with the options of both ends: sends never block, drops are detected, peers are authenticated.

Knows addresses and options; nothing of messages. The path of an ipc:// socket lies in a folder that only its owner may
enter; tcp:// needs CURVE keys unless `insecure`.
"""

import os
import stat
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from shared.config.declaration import ConfigError
from shared.config.settings import WireConfig
from shared.messages import Event, Request
from shared.private_files import is_open_to_others

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
        sock.setsockopt(zmq.ZAP_DOMAIN, b"sluice")  # worker/engine/transport.py checks every key
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no peer may connect without an authenticator
    else:
        sock.curve_serverkey = keys.worker


# Encodes and decodes messages: one encoder, two typed decoders, packed columns. It never uses pickle.
#
# An event frame has two parts: topic (the frontend's id or BROADCAST) and body. A request frame has only a body, to
# which the ROUTER adds the sender. Decoders raise `msgspec.DecodeError` (its subclass ValidationError for the wrong
# shape).

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
encode = _encoder.encode


def decode_request(body: bytes | memoryview) -> Request:
    try:
        return _requests.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:  # text that is not UTF-8; very deep nesting
        raise msgspec.DecodeError(str(error)) from None


def decode_event(body: bytes | memoryview) -> Event:
    try:
        return _events.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def pack_u32(values: Iterable[int]) -> bytes:
    """Packs values as little-endian uint32; raises OverflowError for a value beyond 32 bits."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(data: bytes) -> "array[int]":
    """Reverses pack_u32; raises ValueError when `data` is not a whole number of values."""
    return _unpack("I", data)


def pack_f32(values: Iterable[float]) -> bytes:
    return _little_endian(array("f", values)).tobytes()


def unpack_f32(data: bytes) -> "array[float]":
    return _unpack("f", data)


def _unpack(typecode: str, data: bytes) -> array:  # type: ignore[type-arg]
    values = array(typecode)
    values.frombytes(data)
    return _little_endian(values)


def _little_endian(values: array) -> array:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values.byteswap()
    return values


# Reads and checks the CURVE keys for tcp:// addresses. Every fault in the files is reported in one sentence.
#
#     curve_dir/worker.key_secret      the worker's pair               (only on the worker's host)
#     curve_dir/worker.key             its public half                 (on every frontend's host)
#     curve_dir/frontend.key_secret    a frontend's pair               (only on that frontend's host)
#     curve_dir/allowed/*.key          public keys that may connect    (on the worker's host, read at every handshake)
#
# `sluice keygen` makes the files. Knows files; opens no socket.

ALLOWED = "allowed"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of one end of a connection; a frontend also has the worker's public key. All keys are in Z85."""

    public: bytes
    secret: bytes
    worker: bytes = b""


def keys_for(address: str, wire: WireConfig, *, worker: bool) -> CurveKeys | None:
    """Returns the keys that a socket needs for an address, or None if it needs none.

    worker: whether the socket is the worker's; otherwise it is a frontend's.
    Raises ConfigError naming --curve-dir when a file is missing, unreadable, malformed or open to others.
    """
    if not address.startswith("tcp://") or wire.insecure:
        return None
    if not wire.curve_dir:
        raise ConfigError(f"{address} needs CURVE keys: give --curve-dir, or --insecure on a trusted network")
    folder = Path(wire.curve_dir)
    if not worker:
        return CurveKeys(*_pair(folder / "frontend.key_secret"), _load(folder / "worker.key")[0])
    if not (folder / ALLOWED).is_dir():
        raise ConfigError(f"--curve-dir: there is no folder {folder / ALLOWED} of public keys that may connect")
    return CurveKeys(*_pair(folder / "worker.key_secret"))


def allowed_keys(wire: WireConfig) -> set[bytes]:
    """Returns the public keys that may connect now, in Z85. Files that hold no key are ignored."""
    keys = set()
    for path in (Path(wire.curve_dir) / ALLOWED).glob("*.key"):
        try:
            keys.add(_load(path)[0])
        except ConfigError:
            continue
    return keys


def _pair(path: Path) -> tuple[bytes, bytes]:
    _check_private(path)
    public, secret = _load(path)
    if len(secret) != 40 or zmq.curve_public(secret) != public:
        raise ConfigError(f"--curve-dir: {path} does not hold a pair of matching keys")
    return public, secret


def _check_private(path: Path) -> None:
    """Raises ConfigError if a secret key is open to others."""
    try:
        is_open = is_open_to_others(path)
    except OSError as error:
        raise ConfigError(f"--curve-dir: cannot read the key {path}: {error.strerror}") from error
    if is_open:
        raise ConfigError(f"--curve-dir: others may read the secret key {path} (chmod 600 it)")


def _load(path: Path) -> tuple[bytes, bytes]:
    """Returns the public and the secret key in a file; the secret key is empty if the file has only the public one."""
    import zmq.auth
    from zmq.utils import z85

    try:
        public, secret = zmq.auth.load_certificate(path)
        z85.decode(public), z85.decode(secret or b"")
    except OSError as error:
        raise ConfigError(f"--curve-dir: cannot read the key {path}: {error.strerror or 'no such file'}") from error
    except (ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"--curve-dir: {path} is no key") from error
    if len(public) != 40:
        raise ConfigError(f"--curve-dir: {path} is no key")
    return public, secret or b""
