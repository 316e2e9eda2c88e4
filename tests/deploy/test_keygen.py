"""`sluice keygen`, and commands that need its keys."""

import socket
from pathlib import Path

import pytest

from deploy.cli.main import main


def addresses() -> dict[str, str]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    return {"request_address": f"tcp://127.0.0.1:{ports[0]}", "event_address": f"tcp://127.0.0.1:{ports[1]}"}


def test_keygen_makes_private_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keygen", str(folder)]) == 0
    assert "copy to the worker's host" in capsys.readouterr().out
    secret = (folder / "worker.key_secret").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "allowed")} == {0o700}
    assert sorted(path.name for path in folder.rglob("*.key*")) == sorted(
        ["worker.key", "worker.key_secret", "frontend.key", "frontend.key_secret", "frontend.key"]
    )
    assert main(["keygen", str(folder)]) == 1
    assert "--force replaces them" in capsys.readouterr().err
    assert main(["keygen", str(folder), "--add", "b"]) == 0
    assert (folder / "worker.key_secret").read_bytes() == secret and (folder / "allowed" / "b.key").is_file()
    assert main(["keygen", str(folder), "--force"]) == 0
    assert (folder / "worker.key_secret").read_bytes() != secret
    assert main(["keygen", str(folder), "--add", "../b"]) == 2
    assert main(["keygen", "/proc/nowhere"]) == 1


def test_tcp_without_keys_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={address}" for name, address in addresses().items()]
    for command in ("worker", "frontend", "serve"):
        assert main([command, *flags]) == 2
        assert "--curve-dir, or --insecure" in capsys.readouterr().err
