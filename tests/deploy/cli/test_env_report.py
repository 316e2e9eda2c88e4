"""`sluice env`."""

import json
import subprocess
import sys

import pytest

from tests.deploy.cli.harness import sluice
from tests.patience import PATIENCE_S


def test_env_lists_versions_and_machine_without_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_PORT", "99")
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    code, out, _ = sluice(capsys, "env")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["python"].strip().startswith(".".join(map(str, sys.version_info[:3])))
    assert lines["torch"].strip()[0].isdigit()
    assert {"cpu", "cpu kernels", "gpu", "memory", "model cache", "triton cache"} <= lines.keys()
    assert "SLUICE_PORT=99" in out
    assert "secret" not in out
    _, out, _ = sluice(capsys, "env", "--json")
    assert json.loads(out).keys() == lines.keys()


def test_env_does_not_import_torch() -> None:
    check = "import sys; from deploy.cli.main import main; main(['env']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=PATIENCE_S).returncode == 0
