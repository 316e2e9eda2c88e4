"""The run folder: sockets and metrics of one server, private to its user, gone when it ends.

A lock in it says that its server lives. A folder whose server was killed without a chance to clean up is removed
by the next server that starts.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_PREFIX = "sluice-run-"
_METRICS_ROOM = 1 << 18  # bytes a file; ten times what is counted without labels
_SOCKET_PATH_LIMIT = 100  # the system's is 107 bytes with the socket's own name


class RunDirError(Exception):
    """One sentence on why the run folder cannot be used."""


@contextlib.contextmanager
def run_dir(given: str = "") -> Iterator[Path]:
    """A locked folder of mode 0700 with a `metrics` folder in it; a temporary one unless `given`.

    Raises RunDirError.
    """
    _sweep()
    folder = Path(given).absolute() if given else _temporary_one()
    try:
        with _locked(_private(folder)) as lock:
            _furnish(folder, lock)
            yield folder
    finally:
        if not given:
            shutil.rmtree(folder, ignore_errors=True)


def _temporary_one() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise RunDirError(f"no folder for sockets can be made ({error.strerror}); name one with --run-dir") from error


def _furnish(folder: Path, lock: int) -> None:
    with _usable(folder):
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        shutil.rmtree(folder / "metrics", ignore_errors=True)
        (folder / "metrics").mkdir()


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirError(f"cannot use --run-dir {folder}: {error.strerror}") from error


def running_servers(given: str = "") -> list[int]:
    """Process ids of servers that live: the one in the folder `given`, else this user's in temporary ones."""
    folders = [Path(given)] if given else [folder for folder in _temporary() if folder.stat().st_uid == os.getuid()]
    return [pid for folder in folders if (pid := _living(folder))]


def _living(folder: Path) -> int:
    """Whose run folder it is; 0: nobody's who lives."""
    with contextlib.suppress(OSError, ValueError):
        try:
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int((folder / "lock").read_text())
    return 0


def _temporary() -> Iterable[Path]:
    try:
        return Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")
    except OSError:  # there is no place for temporary files at all
        return ()


def reserve_metrics(folder: Path, name: str) -> bool:
    """Takes the room for the metrics of process `name` in advance; False when there is none.

    prometheus-client maps its files sparsely: on a full disk, counting one more request would end the process. What an
    earlier process of this name has counted stays in them.
    """
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / f"{kind}_{name}.db" for kind in ("counter", "histogram", "gauge_max")):
            made += [] if file.exists() else [file]
            with file.open("ab") as out:
                os.posix_fallocate(out.fileno(), 0, _METRICS_ROOM)
    except OSError:
        for file in made:
            file.unlink(missing_ok=True)
        return False
    return True


def _private(folder: Path) -> Path:
    if len(os.fsencode(folder / "requests.sock")) > _SOCKET_PATH_LIMIT:
        raise RunDirError(f"--run-dir {folder} is too long a path for sockets; name a shorter one")
    with _usable(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    with _usable(folder):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _kept(folder):
            yield lock
    except BlockingIOError as error:
        raise RunDirError(f"--run-dir {folder} belongs to a server that is running") from error
    finally:
        os.close(lock)


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Locks the folder itself, too: whoever clears old files out of temporary folders passes over one that is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sweep() -> None:
    for folder in _temporary():
        with contextlib.suppress(OSError, RunDirError):
            if folder.stat().st_uid == os.getuid() and (folder / "lock").stat().st_size:  # else it is being made
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
