"""deploy/cli/main.py, and the commands that use it."""

import importlib.util
import sys

import pytest

from deploy.cli import main
from tests.deploy.cli.harness import sluice


@pytest.mark.parametrize("command", [("serve", "--port=0"), ("worker", "--run-dir=/tmp/none")])
def test_worker_without_torch_is_one_line_with_the_remedy_and_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(main, "find_spec", lambda name: None if name == "torch" else find(name))
    code, out, err = sluice(capsys, *command)
    assert (code, out) == (3, "")
    assert err == (
        f"sluice {command[0]}: a worker needs torch, which this Python does not have; "
        f"run: {sys.executable} -m pip install torch\n"
    )


def test_package_that_is_missing_later_is_named_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deploy.cli.probe", None)
    # a missing module of our own is a broken installation, which deserves a traceback
    with pytest.raises(ModuleNotFoundError):
        sluice(capsys, "probe", "http://127.0.0.1:1/health")
    monkeypatch.delitem(sys.modules, "deploy.cli.probe")
    monkeypatch.delitem(sys.modules, "deploy.cli.keygen", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    code, _, err = sluice(capsys, "keygen", "/tmp/none")
    assert code == 3
    assert err.startswith("sluice keygen: the package zmq is not installed in this Python; run: ")
