"""The run folder: sockets, heartbeats and metrics of one server, private to its user, removed when the server ends.

A locked file in the folder shows that the server is alive. If a server is killed without a chance to clean up, the next
server that starts removes the folder.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.wire.address import LONGEST_SOCKET_PATH

_PREFIX = "sluice-run-"
_METRICS_FILE_BYTES = 1 << 18  # ten times what metrics without labels need
_LONGEST = LONGEST_SOCKET_PATH - len("/w999/requests.sock")  # bytes: several workers have folders in the run folder


class RunDirError(Exception):
    """The run folder cannot be used; the message is one sentence that says why."""


@contextlib.contextmanager
def run_dir(path: str = "") -> Iterator[Path]:
    """Yields a locked folder of mode 0700 with a `metrics` folder in it. Raises RunDirError.

    path: the folder; a temporary one if empty.
    """
    _remove_dead()
    folder = Path(path).absolute() if path else _make_temporary()
    try:
        _check_length(folder, given=bool(path))
        with _locked(_private(folder)) as lock:
            _prepare(folder, lock)
            yield folder
    finally:
        if not path:
            shutil.rmtree(folder, ignore_errors=True)


def _make_temporary() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise RunDirError(f"cannot make a folder for sockets ({error.strerror}); name one with --run-dir") from error


def _prepare(folder: Path, lock: int) -> None:
    with _as_run_dir_error(folder):
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        shutil.rmtree(folder / "metrics", ignore_errors=True)
        (folder / "metrics").mkdir()
        (folder / "adapters.json").unlink(missing_ok=True)  # the adapters that were loaded into an earlier server


@contextlib.contextmanager
def _as_run_dir_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirError(f"cannot use --run-dir {folder}: {error.strerror}") from error


def running_servers(path: str = "") -> list[int]:
    """Returns the process ids of running servers: of the server with the run folder `path`, or of all servers with
    temporary run folders of this user if `path` is empty."""
    folders = [Path(path)] if path else [folder for folder in _temporary() if folder.stat().st_uid == os.getuid()]
    return [pid for folder in folders if (pid := _server_pid(folder))]


def _server_pid(folder: Path) -> int:
    """Returns the process id of the folder's server, or 0 if the server is not running."""
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
    except OSError:  # the system has no folder for temporary files
        return ()


def reserve_metrics(folder: Path, name: str) -> bool:
    """Allocates the metrics files of process `name` in advance; returns False if the disk has no space.

    prometheus-client maps sparse files, so on a full disk, counting one more request would kill the process. The counts
    of an earlier process of this name are kept.
    """
    created: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder / f"{kind}_{name}.db" for kind in ("counter", "histogram", "gauge_max")):
            created += [] if file.exists() else [file]
            with file.open("ab") as out:
                os.posix_fallocate(out.fileno(), 0, _METRICS_FILE_BYTES)
    except OSError:
        for file in created:
            file.unlink(missing_ok=True)
        return False
    return True


def _check_length(folder: Path, *, given: bool) -> None:
    if (size := len(os.fsencode(folder))) <= _LONGEST:
        return
    limit = f"is too long for the paths of sockets ({size} bytes of at most {_LONGEST})"
    if given:
        raise RunDirError(f"--run-dir {folder} {limit}; name a shorter one")
    raise RunDirError(f"the folder for temporary files, {folder.parent}, {limit}; name a shorter one with --run-dir")


def _private(folder: Path) -> Path:
    with _as_run_dir_error(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise RunDirError(f"--run-dir {folder} belongs to another user")
        folder.chmod(0o700)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    with _as_run_dir_error(folder):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _locked_against_cleanup(folder):
            yield lock
    except BlockingIOError as error:
        raise RunDirError(f"--run-dir {folder} belongs to a running server") from error
    finally:
        os.close(lock)


@contextlib.contextmanager
def _locked_against_cleanup(folder: Path) -> Iterator[None]:
    """Locks the folder itself, too, because programs that clean up temporary files skip locked folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system supports locks on folders
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_dead() -> None:
    for folder in _temporary():
        with contextlib.suppress(OSError, RunDirError):
            # the lock file is empty while its server is starting
            if folder.stat().st_uid == os.getuid() and (folder / "lock").stat().st_size:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
