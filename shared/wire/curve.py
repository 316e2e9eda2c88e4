"""Reads and checks the CURVE keys for tcp:// addresses. Every fault in the files is reported in one sentence.

    curve_dir/worker.key_secret      the worker's pair               (only on the worker's host)
    curve_dir/worker.key             its public half                 (on every frontend's host)
    curve_dir/frontend.key_secret    a frontend's pair               (only on that frontend's host)
    curve_dir/allowed/*.key          public keys that may connect    (on the worker's host, read at every handshake)

`sluice keygen` makes the files. Knows files; opens no socket.
"""

from dataclasses import dataclass
from pathlib import Path

import zmq

from shared.config import ConfigError, WireConfig
from shared.private_files import is_open_to_others

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
