"""`sluice replay` draws the latencies of a replay as a picture."""

from pathlib import Path

import pytest

from deploy.cli import replay
from deploy.launcher.child_command import CliError


def test_picture_is_written(tmp_path: Path) -> None:
    replay.draw([("first token", [], []), ("whole answer", [1.0, 2.0], [2.0, 3.0])], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--plot .*p.png cannot be written: No such file or directory"):
        replay.draw([("whole answer", [1.0], [2.0])], tmp_path / "missing" / "p.png")


def test_wrong_ending_and_missing_matplotlib_are_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    replay.check(Path("p.png"))
    with pytest.raises(CliError, match=r"--plot p\.xyz: its name must end with \.png"):
        replay.check(Path("p.xyz"))
    monkeypatch.setattr(replay, "find_spec", lambda name: None)
    with pytest.raises(CliError, match="--plot needs matplotlib: pip install matplotlib"):
        replay.check(Path("p.png"))
