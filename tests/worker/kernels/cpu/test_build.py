"""Where the C library is looked for, and what becomes of a worker that cannot have one."""

import os
from pathlib import Path

import pytest

from worker.kernels.cpu import build

Made = list[Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """What was compiled, in sources and a cache of the test's own."""
    seen: Made = []

    def compiled(compiler: str, room: Path) -> Path:
        seen.append(room)
        (room / "library.so").touch()
        return room / "library.so"

    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(build, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(build, "_compile", compiled)
    monkeypatch.setattr(build, "machine", lambda: "x86_64")
    monkeypatch.setenv("CC", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return seen


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != build.SOURCES)


def test_installed_library_is_used_in_a_read_only_package(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = build.build()
    assert beside is not None and beside.parent == tmp_path / "sources" and len(made) == 1
    read_only(monkeypatch)
    assert build.build() == beside and len(made) == 1


def test_build_in_a_read_only_package_uses_the_cache(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch)
    cached = build.build()
    assert cached is not None and cached.parent == tmp_path / "cache" / "sluice"
    assert build.build() == cached and len(made) == 1


@pytest.mark.parametrize("trouble", ["a file is in the way", "no home"])
def test_build_without_a_writable_folder_returns_none(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    read_only(monkeypatch)
    (tmp_path / "cache").touch()
    if trouble == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
    assert build.build() is None and not made
    assert "plain PyTorch" in capsys.readouterr().err
