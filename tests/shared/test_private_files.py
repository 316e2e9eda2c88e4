"""Which files count as open to other users, and which cache folders are trusted."""

import os
from pathlib import Path

import pytest

from shared.private_files import cache_folder, is_open_to_others, private_cache
from tests.strangers import give_away


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sluice"


@pytest.mark.parametrize(
    ("mode", "own", "others"), [(0o600, False, False), (0o440, True, False), (0o640, True, False), (0o644, True, True)]
)
def test_own_file_must_be_closed_to_all_and_a_mounted_secret_to_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, own: bool, others: bool
) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(mode)
    assert is_open_to_others(file) is own
    give_away(file, monkeypatch)
    assert is_open_to_others(file) is others


def test_cache_is_made_with_mode_0700(cache: Path) -> None:
    assert private_cache() == cache and cache.stat().st_mode & 0o777 == 0o700


def test_cache_that_others_could_write_to_is_closed(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert private_cache().stat().st_mode & 0o777 == 0o700


def test_cache_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    give_away(cache, monkeypatch)
    with pytest.raises(PermissionError, match="other users can write to it"):
        private_cache()


def test_cache_behind_another_users_link_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "target")
    assert private_cache() == cache, "a link of one's own is fine"
    give_away(cache, monkeypatch)
    with pytest.raises(PermissionError):
        private_cache()


def test_user_without_a_home_has_a_folder_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"sluice-{os.geteuid()}"
    assert private_cache().stat().st_mode & 0o777 == 0o700
