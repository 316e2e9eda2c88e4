"""The folder in shared memory through which prefill workers hand prompts over: private, bounded, and removed."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from deploy.launcher import run_dir
from deploy.launcher.run_dir import with_store
from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values


def settings_with(**values: object) -> Settings:
    return check(with_values(Settings(), {"prefill_workers": 1, **values}))


def test_folder_is_private_locked_and_removed(tmp_path: Path) -> None:
    with with_store(settings_with(), (), tmp_path) as settings:
        [(name, size)] = settings.worker.kv_tiers
        folder = Path(name)
        assert folder.parent.parent == tmp_path and stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert 0 < size <= run_dir.MOST_GB and check(settings).worker == settings.worker
        folder.mkdir()
        (folder / "page").touch()
        with (folder.parent / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with with_store(settings_with(), (), tmp_path) as other:
            assert (folder / "page").exists() and other.worker.kv_store != settings.worker.kv_store
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, starting, strange = (tmp_path / name for name in ("sluice-kv-dead", "sluice-kv-new", "report"))
    for folder in (dead, starting, strange):
        (folder / "kv").mkdir(parents=True)
        (folder / "lock").touch()
    (dead / "lock").write_text("4711")
    with with_store(settings_with(), (), tmp_path):
        assert not dead.exists() and starting.exists() and strange.exists()


@pytest.mark.parametrize("values", [{"prefill_workers": 0}, {"kv_store": "/srv/kv"}])
def test_no_folder_is_made_that_is_not_needed(tmp_path: Path, values: dict[str, object]) -> None:
    settings = settings_with(**values)
    with with_store(settings, values, tmp_path) as same:
        assert same is settings and not list(tmp_path.iterdir())


def test_size_is_half_of_what_is_free_or_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(run_dir.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(run_dir.shutil, "disk_usage", lambda path: usage(1 << 31, 1 << 30, 1 << 30))
    with with_store(settings_with(), (), tmp_path) as settings:
        assert settings.worker.kv_tiers[0][1] == 0.5
    given = settings_with(kv_store_gb="0.75")
    with with_store(given, ("kv_store_gb",), tmp_path) as settings:
        assert settings.worker.kv_tiers[0][1] == 0.75
    monkeypatch.setattr(run_dir.shutil, "disk_usage", lambda path: usage(1 << 26, 1 << 25, 1 << 24))
    with (
        pytest.raises(ConfigError, match=r"--prefill-workers needs --kv-store: .* 0\.016 GiB"),
        with_store(settings_with(), (), tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_missing_shared_memory_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"--prefill-workers needs --kv-store: .*No such file"),
        with_store(settings_with(), (), tmp_path / "none"),
    ):
        pass


def test_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    with with_store(settings_with(), (), tmp_path) as settings:
        lock = str(Path(settings.worker.kv_store).parent / "lock")
        [held] = [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == lock]
        assert not os.get_inheritable(int(held))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
