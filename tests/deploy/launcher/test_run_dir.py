"""The run folder: its lock, its cleanup, and its preallocated files."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from deploy.launcher.run_dir import RunDirError, reserve_metrics, run_dir, running_servers
from deploy.launcher.serve import watchdog_for
from shared.address import LONGEST_SOCKET_PATH
from shared.config.settings import Settings
from tests.strangers import give_away


@pytest.fixture
def temporary(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(socket_folder))
    return socket_folder


def test_temporary_run_dir_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with run_dir() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "metrics").is_dir()
    assert not folder.exists()


def test_named_run_dir_is_kept_and_belongs_to_one_server(socket_folder: Path) -> None:
    folder = socket_folder / "deep" / "run"
    with run_dir(str(folder)), pytest.raises(RunDirError, match="belongs to a running server"), run_dir(str(folder)):
        pass
    assert folder.is_dir()
    with run_dir(str(folder)) as again:
        assert again == folder
    (socket_folder / "file").touch()
    with pytest.raises(RunDirError, match="cannot use"), run_dir(str(socket_folder / "file")):
        pass


def test_folder_of_other_programs_is_refused_and_stays_as_it_was(socket_folder: Path) -> None:
    folder = socket_folder / "shared"
    (folder / "metrics").mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(RunDirError, match=r"shared is used by other programs"), run_dir(str(folder)):
        pass
    assert (folder / "metrics").is_dir() and stat.S_IMODE(folder.stat().st_mode) == 0o755
    (folder / "metrics").rmdir()
    for _ in range(2):  # an empty folder, and then one that a server had and somebody opened
        with run_dir(str(folder)):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o755)


def test_run_dir_that_is_too_long_for_sockets_is_refused(
    socket_folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = socket_folder / ("x" * (LONGEST_SOCKET_PATH - len(f"{socket_folder}//w999/requests.sock")))
    with run_dir(str(longest)):
        pass
    with pytest.raises(RunDirError, match=rf"--run-dir {longest}x is too long"), run_dir(f"{longest}x"):
        pass
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    with pytest.raises(RunDirError, match=rf"the folder for temporary files, {longest}, is too long"), run_dir():
        pass
    assert not [*longest.glob("sluice-run-*")]


def test_run_dir_of_another_user_is_refused(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (socket_folder / "run").mkdir(mode=0o700)
    give_away(socket_folder / "run", monkeypatch)
    with pytest.raises(RunDirError, match="run belongs to another user"), run_dir(str(socket_folder / "run")):
        pass


def test_folders_of_killed_servers_are_removed_and_others_kept(temporary: Path) -> None:
    dead = temporary / "sluice-run-dead"
    dead.mkdir()
    (dead / "lock").write_text("1")
    young = temporary / "sluice-run-young"  # a folder that another server is about to lock
    young.mkdir()
    (young / "lock").touch()
    with run_dir() as living, run_dir():
        assert living.exists() and young.exists()
        assert not dead.exists()


def test_unusable_run_dir_is_one_line(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lock", "metrics"):
        folder = socket_folder / name
        folder.mkdir(mode=0o700)
        (folder / "lock").mkdir() if name == "lock" else (folder / "metrics").touch()
        with pytest.raises(RunDirError, match=f"cannot use --run-dir {folder}: "), run_dir(str(folder)):
            pass

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(RunDirError, match="name one with --run-dir"), run_dir():
        pass
    assert running_servers() == []


def test_mapped_files_are_allocated_at_start_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the allocation, writing to a mapped page on a full disk would kill the process."""
    assert reserve_metrics(tmp_path / "metrics", "worker")
    files = sorted((tmp_path / "metrics").iterdir())
    assert [file.name for file in files] == ["counter_worker.db", "gauge_max_worker.db", "histogram_worker.db"]
    files[0].write_bytes(b"counted" + files[0].read_bytes()[7:])
    assert reserve_metrics(tmp_path / "metrics", "worker") and files[0].read_bytes()[:7] == b"counted"
    heartbeat = watchdog_for(Settings(), tmp_path, "heartbeat").heartbeat.file
    assert heartbeat is not None
    assert all(file.stat().st_blocks * 512 >= file.stat().st_size > 0 for file in (heartbeat, *files))

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "full").mkdir()
    assert not reserve_metrics(tmp_path / "full", "worker") and not list((tmp_path / "full").iterdir())
    assert not reserve_metrics(tmp_path / "metrics", "worker") and all(file.exists() for file in files)
    with pytest.raises(RunDirError, match="No space left"):
        watchdog_for(Settings(), tmp_path / "full", "heartbeat")
