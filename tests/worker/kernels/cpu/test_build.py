"""Where a worker looks for the C library, and what it does without one."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.strangers import give_away
from worker.kernels.cpu import build

Made = list[Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Records compilations, with the test's own sources and cache."""
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


def test_processes_that_start_together_compile_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = build._compile

    def slowly(compiler: str, room: Path) -> Path:
        time.sleep(0.2)
        return compiled(compiler, room)

    monkeypatch.setattr(build, "_compile", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: build.build(), range(4))]
    assert len(made) == 1 and found == [build.SOURCES / f"libsluice-{build._key()}.so"] * 4


def test_build_without_a_writable_folder_returns_none(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only(monkeypatch)
    (tmp_path / "cache").touch()
    assert build.build() is None and not made
    assert "plain PyTorch" in capsys.readouterr().err


def test_build_without_a_home_uses_a_private_folder_among_temporary_files(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    read_only(monkeypatch)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = build.build()
    assert library is not None and library.parent == tmp_path / f"sluice-{os.geteuid()}"
    assert library.parent.stat().st_mode & 0o777 == 0o700


def test_library_in_another_users_cache_is_not_used(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only(monkeypatch)
    cached = build.build()
    assert cached is not None
    give_away(cached.parent, monkeypatch)
    assert build.build() is None
    assert "other users can write to it" in capsys.readouterr().err


def test_library_of_another_user_is_compiled_again(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(monkeypatch)
    cached = build.build()
    assert cached is not None and len(made) == 1
    monkeypatch.setattr(build, "is_trusted", lambda path: path != cached)
    assert build.build() == cached and len(made) == 2
