"""A file of the K/V store is used only if every byte of it is right."""

import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from worker.kv_cache.store_file import TEMPORARY, Disk, Head, Unusable, packed_head

SPACE, DIGEST = b"s" * 32, b"d" * 32


def written(path: Path, size: int = 300) -> bytes:
    payload = bytes(at % 256 for at in range(size))
    head = Head(SPACE, DIGEST, b"", 32, "fp_x", 2, (0, 1), False, size, zlib.crc32(payload))
    Disk().write(path, (packed_head(head), payload))
    return path.read_bytes()


def test_file_comes_back_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "ab" / "file"
    written(path)
    head, payload = Disk().read(path, SPACE, DIGEST)
    assert payload.tolist() == [at % 256 for at in range(300)] and head.absent == (0, 1) and head.tokens == 32
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert Disk().read_head(path) == head


def test_first_process_that_creates_a_file_wins(tmp_path: Path) -> None:
    for data in (b"first", b"second"):
        Disk().create(tmp_path / "token", data)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert Disk().text(tmp_path / "token") == b"first"


def test_no_file_with_one_byte_changed_is_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    good = written(path)
    for at in range(len(good)):
        for change in (1, 0x80, 0xFF):
            path.write_bytes(good[:at] + bytes([good[at] ^ change]) + good[at + 1 :])
            with pytest.raises(Unusable):
                Disk().read(path, SPACE, DIGEST)


def test_no_file_that_was_cut_off_or_grew_is_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    good = written(path)
    for end in range(len(good)):
        path.write_bytes(good[:end])
        with pytest.raises(Unusable):
            Disk().read(path, SPACE, DIGEST)
    path.write_bytes(good + b"\0")
    with pytest.raises(Unusable, match="torn"):
        Disk().read(path, SPACE, DIGEST)


ODD: dict[str, Callable[[Path, Path], object]] = {  # what may lie where a file should be → makes it, given a good file
    "a link to a good file": lambda path, good: path.symlink_to(good),
    "a link to itself": lambda path, good: path.symlink_to(path),
    "a link to nothing": lambda path, good: path.symlink_to(good / "nothing"),
    "a pipe": lambda path, good: os.mkfifo(path),
    "a folder": lambda path, good: path.mkdir(),
    "a folder with a file": lambda path, good: (path / "below").mkdir(parents=True),
    "an empty file": lambda path, good: path.touch(),
    "ten GB of zeros": lambda path, good: (path.touch(), os.truncate(path, 10 << 30)),
    "ten GB behind a good file": lambda path, good: (path.write_bytes(good.read_bytes()), os.truncate(path, 10 << 30)),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_of_the_store_is_not_waited_for_and_not_used(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "good")
    path = tmp_path / "kv" / "ab" / ("0" * 38)
    path.parent.mkdir(parents=True)
    ODD[kind](path, tmp_path / "good")
    disk = Disk()
    for read in (partial(disk.read, path, SPACE, DIGEST), partial(disk.text, path)):
        if kind not in ("an empty file", "ten GB of zeros", "ten GB behind a good file") or read.func == disk.read:
            with pytest.raises(Unusable, match=r"foreign|torn"):
                read()
    listed = [found for found, _, _ in disk.files(tmp_path / "kv")]
    assert listed == ([] if "folder" in kind else [path])
    if kind == "a folder with a file":
        with pytest.raises(OSError, match="not empty"):
            disk.remove(path)
        return
    disk.remove(path)
    assert not os.path.lexists(path) and (tmp_path / "good").exists()


def test_file_that_cannot_be_closed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        close(fd)
        raise OSError(errno.ENOSPC, "a simulated fault")

    close = os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", full)
        with pytest.raises(OSError, match="simulated"):
            written(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_file_of_another_model_or_prefix_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path)
    for asked in ((b"t" * 32, DIGEST), (SPACE, b"e" * 32)):
        with pytest.raises(Unusable, match="foreign"):
            Disk().read(path, *asked)
    path.write_bytes(b"something else that is long enough to have a header")
    with pytest.raises(Unusable, match="foreign"):
        Disk().read(path, SPACE, DIGEST)


WRITER = """
import sys, zlib
from pathlib import Path
from worker.kv_cache.store_file import Disk, Head, packed_head
payload = bytes(16 << 20)
head = Head(b"s" * 32, b"d" * 32, b"", 32, "", 2, (0,), False, len(payload), zlib.crc32(payload))
for at in range(10_000):
    Disk().write(Path(sys.argv[1]) / f"{at % 2}", (packed_head(head), payload))
"""


def test_kill_during_a_write_leaves_no_file_that_is_used(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=Path(__file__).parents[3])
    until = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < until and writer.poll() is None, "it writes nothing"
        os.kill(writer.pid, signal.SIGSTOP)
        if list(tmp_path.glob(f"*{TEMPORARY}")) and (tmp_path / "0").exists():
            break
        os.kill(writer.pid, signal.SIGCONT)
        time.sleep(0.005)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert any(name.endswith(TEMPORARY) for name in names), "it was not killed during a write"
    for name in names:
        if not name.endswith(TEMPORARY):
            Disk().read(tmp_path / name, SPACE, DIGEST)
