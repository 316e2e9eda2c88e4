"""Tests of shared/wire.py."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.cli.keygen import make_keys
from shared.config.declaration import ConfigError
from shared.config.settings import WireConfig
from shared.wire import keys_for


def addresses() -> dict[str, str]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    return {"request_address": f"tcp://127.0.0.1:{ports[0]}", "event_address": f"tcp://127.0.0.1:{ports[1]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "worker", "frontend")
    return tmp_path / "keys"


@pytest.fixture
def wire(keys: Path) -> WireConfig:
    return WireConfig(**addresses(), curve_dir=str(keys))


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text)


@pytest.mark.parametrize(
    ("spoil", "worker", "said"),
    [
        (lambda folder: shutil.rmtree(folder), True, "allowed"),
        (lambda folder: shutil.rmtree(folder / "allowed"), True, "there is no folder .*allowed"),
        (remove("worker.key_secret"), True, "cannot read the key .*worker.key_secret: No such file"),
        (remove("frontend.key_secret"), False, "cannot read the key .*frontend.key_secret"),
        (remove("worker.key"), False, "cannot read the key .*worker.key"),
        (lambda folder: (folder / "worker.key_secret").chmod(0o640), True, "others may read .*worker.key_secret"),
        (write("worker.key_secret", b""), True, "worker.key_secret is no key"),
        (write("worker.key", b"\xff\xfe\x00"), False, "worker.key is no key"),
        (write("worker.key", b'public-key = "' + b"~" * 40 + b'"'), False, "worker.key is no key"),
        (lambda folder: (folder / "worker.key").replace(folder / "worker.key_secret"), True, "do.* not hold a pair"),
    ],
)
def test_unusable_key_file_is_named_in_the_error(
    keys: Path, wire: WireConfig, spoil: Callable[[Path], object], worker: bool, said: str
) -> None:
    assert keys_for(wire.requests, wire, worker=worker) is not None
    spoil(keys)
    with pytest.raises(ConfigError, match=f"--curve-dir: .*{said}"):
        keys_for(wire.requests, wire, worker=worker)


def test_file_without_a_key_in_the_allowed_folder_is_ignored(keys: Path, wire: WireConfig) -> None:
    from shared.wire import allowed_keys

    (keys / "allowed" / "notes.key").write_bytes(b"\xff")
    (keys / "allowed" / "folder.key").mkdir()
    assert len(allowed_keys(wire)) == 1
