"""`sluice replay`: its output and its exit code."""

from pathlib import Path

import msgspec
import pytest

from deploy.cli import replay
from tests.deploy.cli.harness import sluice
from tests.deploy.cli.requests import FakeServer, completion, recorded


@pytest.mark.parametrize(("text", "code"), [("hello", 0), ("other", 1)])
def test_exit_code_says_whether_all_are_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    monkeypatch.setattr(replay, "Server", lambda url, key: FakeServer(lambda body: completion(text)))
    file, picture = tmp_path / "record", tmp_path / "p.png"
    file.write_bytes(msgspec.json.encode(recorded()) + b"\n")
    got, printed, errors = sluice(capsys, "replay", str(file), "--pace=max", "--plot", str(picture))
    assert (got, errors) == (code, "")
    assert printed.splitlines()[-1] == f"{1 - code} identical, {code} different, 0 errors"
    assert picture.exists()


def test_unusable_record_is_refused_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record").write_text("hello\n")
    code, _, errors = sluice(capsys, "replay", str(tmp_path / "record"))
    assert code == 2 and "is no line of a record" in errors


@pytest.mark.parametrize("flags", [(), ("--model", "new"), ("--model", "old=new")])
def test_server_with_another_name_for_its_model_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    server = FakeServer()
    monkeypatch.setattr(replay, "Server", lambda url, key: server)
    body = {"prompt": "p", "model": "old"}
    (tmp_path / "record").write_bytes(msgspec.json.encode(recorded(request=body, model="old")) + b"\n")
    code, printed, _ = sluice(capsys, "replay", str(tmp_path / "record"), "--pace=max", *flags)
    assert code == 0 and [sent["model"] for sent in server.bodies] == ["new"]
    assert ("note: model old was sent as new" in printed) == (not flags)
