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
    """A locked folder of mode 0700 with a `metrics` folder in it; a temporary one unless `given`."""
    _sweep()
    folder = Path(given).absolute() if given else Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _locked(_private(folder)) as lock:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            shutil.rmtree(folder / "metrics", ignore_errors=True)
            (folder / "metrics").mkdir()
            yield folder
    finally:
        if not given:
            shutil.rmtree(folder, ignore_errors=True)


def servers(given: str = "") -> list[int]:
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
    return Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")


def reserve_metrics(folder: Path) -> bool:
    """Takes the room for this process's metrics in advance; False when there is none.

    prometheus-client maps its files sparsely: on a full disk, counting one more request would end the process.
    """
    files = [folder / f"{kind}_{os.getpid()}.db" for kind in ("counter", "histogram", "gauge_max")]
    try:
        for file in files:
            with file.open("wb") as out:
                os.posix_fallocate(out.fileno(), 0, _METRICS_ROOM)
    except OSError:
        for file in files:
            file.unlink(missing_ok=True)
        return False
    return True


def _private(folder: Path) -> Path:
    if len(os.fsencode(folder / "requests.sock")) > _SOCKET_PATH_LIMIT:
        raise RunDirError(f"--run-dir {folder} is too long a path for sockets; name a shorter one")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise RunDirError(f"cannot use --run-dir {folder}: {error.strerror}") from error
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError as error:
        raise RunDirError(f"--run-dir {folder} belongs to a server that is running") from error
    finally:
        os.close(lock)


def _sweep() -> None:
    for folder in _temporary():
        with contextlib.suppress(OSError, RunDirError):
            if folder.stat().st_uid == os.getuid() and (folder / "lock").exists():
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
