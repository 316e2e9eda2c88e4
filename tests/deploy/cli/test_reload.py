"""`sluice reload`: which server it signals."""

import os
import tempfile
from pathlib import Path

import pytest

from deploy.cli.processes import reload
from deploy.launcher.child_command import CliError
from deploy.launcher.run_dir import run_dir, running_servers


@pytest.fixture
def temporary(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_folder))
    return socket_folder


def test_needs_one_server(temporary: Path) -> None:
    (temporary / "sluice-run-dead").mkdir()
    (temporary / "sluice-run-dead" / "lock").write_text("1")
    assert running_servers() == []
    with pytest.raises(CliError, match="no server runs"):
        reload([])
    with run_dir() as folder:
        assert running_servers() == running_servers(str(folder)) == [os.getpid()]
        with run_dir(), pytest.raises(CliError, match="2 servers run here; send SIGHUP to one"):
            reload([])
    with pytest.raises(CliError, match="no server runs in"):
        reload(["--run-dir", str(folder)])
