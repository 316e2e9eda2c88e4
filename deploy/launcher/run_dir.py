"""The run folder: sockets, heartbeats and metrics of one server, private to its user, removed when the server ends.

A locked file in the folder shows that the server is alive. If a server is killed without a chance to clean up, the next
server that starts removes the folder.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.address import LONGEST_SOCKET_PATH
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values

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
    _remove_dead(_temporary())
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
        if holds_others_files(folder, "lock"):
            raise RunDirError(f"--run-dir {folder} is used by other programs: name a folder for this server alone")
        folder.chmod(0o700)
    return folder


def holds_others_files(folder: Path, own: str) -> bool:
    """Whether other users can enter a folder, and it has files, but none that matches `own`.

    Such a folder (/tmp, /etc, a home) must not be closed to others: they use it.
    """
    if not stat.S_IMODE(folder.stat().st_mode) & 0o077:
        return False
    return any(folder.iterdir()) and not any(folder.glob(own))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    with _as_run_dir_error(folder):
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirError(f"--run-dir {folder} belongs to a running server") from error
        with _locked_against_cleanup(folder):
            yield lock
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


def _remove_dead(folders: Iterable[Path]) -> None:
    """Removes those of the folders whose servers were killed."""
    for folder in folders:
        with contextlib.suppress(OSError, RunDirError):
            # the lock file is empty while its server is starting
            if folder.stat().st_uid == os.getuid() and (folder / "lock").stat().st_size:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


# The folder in /dev/shm through which --prefill-workers hand prompts over if no --kv-store is named.
#
# It is memory: it is private to its user, and removed when the server ends, or as a run folder is after a crash.

SHARED_MEMORY = Path("/dev/shm")
MOST_GB, SHARE = 4.0, 0.5  # its size without --kv-store-gb: 4 GiB, or half of what is free, if that is less
LEAST_GB = 0.03  # less room hands nothing over
_STORE_PREFIX, _GIB = "sluice-kv-", 1 << 30


@contextlib.contextmanager
def with_store(settings: Settings, explicit: Collection[str], parent: Path = SHARED_MEMORY) -> Iterator[Settings]:
    """Yields the settings with a new folder as --kv-store if the workers need one; else the settings as they are.

    explicit: names of the settings that the user gave. Raises ConfigError if there is no such folder, or no room.
    """
    if not settings.launch.prefill_workers or settings.worker.kv_store:
        yield settings
        return
    _remove_dead(parent.glob(f"{_STORE_PREFIX}*"))
    try:
        folder = Path(tempfile.mkdtemp(prefix=_STORE_PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"--prefill-workers needs --kv-store: a folder in {parent} cannot be made ({error.strerror})"
        ) from error
    try:
        with _locked(folder) as lock:
            os.write(lock, str(os.getpid()).encode())
            free = shutil.disk_usage(folder).free / _GIB
            size = settings.worker.kv_store_gb if "kv_store_gb" in explicit else f"{min(MOST_GB, SHARE * free):.3f}"
            if float(size) < LEAST_GB or free < LEAST_GB:
                raise ConfigError(
                    f"--prefill-workers needs --kv-store: {parent} has room for {free:.3f} GiB only, too little for it"
                )
            yield with_values(settings, {"kv_store": str(folder / "kv"), "kv_store_gb": size})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# The listening sockets of one port: one per frontend, all opened and held by the launcher.
#
# The kernel distributes new connections over the sockets. The launcher keeps them open, so connections to a frontend
# that died wait in its socket's queue until it is restarted.


class ListenError(Exception):
    """The port cannot be opened; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """The flags that name a host and a port, for errors."""

    host: str = "--host"
    port: str = "--port"


OF_FRONTENDS, OF_WORKERS = ListenFlags(), ListenFlags("--worker-host", "--worker-metrics-port")


def listen(host: str, port: int, count: int = 1, flags: ListenFlags = OF_FRONTENDS) -> list[socket.socket]:
    """Opens `count` sockets that listen on the same port; port 0 picks a free one. Raises ListenError."""
    family, address = _resolve(host, port, flags)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            _bind(probe, address, shared=False)  # fails if any process has the port, even a process that shares it
        sockets: list[socket.socket] = []
        for _ in range(count):
            sockets.append(_listening(family, (address[0], sockets[0].getsockname()[1]) if sockets else address))
        return sockets
    except OSError as error:
        raise ListenError(_reason(error, host, port, flags)) from error


def is_taken(host: str, port: int) -> bool:
    """Whether `listen` would fail on this port."""
    try:
        for listener in listen(host, port):
            listener.close()
    except ListenError:
        return True
    return False


def url(listener: socket.socket, *, secure: bool = False) -> str:
    """Returns the URL under which a browser on this machine reaches a listening socket."""
    scheme = "https" if secure else "http"
    host, port = reachable(listener)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Returns the address for connecting to a listening socket: 0.0.0.0 and :: become loopback."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def _resolve(host: str, port: int, flags: ListenFlags) -> tuple[int, tuple[str, int]]:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except UnicodeError as error:
        raise ListenError(f"cannot listen on {flags.host} {host}: that is not a host name") from error
    except OSError as error:
        raise ListenError(f"cannot listen on {flags.host} {host}: {error.strerror or error}") from error
    return info[0], (str(info[4][0]), port)


def _listening(family: int, address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(listener, address, shared=True)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(target: socket.socket, address: tuple[str, int], *, shared: bool) -> None:
    target.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        target.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    target.bind(address)


def _reason(error: OSError, host: str, port: int, flags: ListenFlags) -> str:
    if error.errno == errno.EADDRINUSE:
        remedy = f"stop the process that has it, or choose another with {flags.port}"
        return f"port {port} is already in use (on {host}; {remedy})"
    return f"cannot listen on {host} port {port}: {os.strerror(error.errno) if error.errno else error}"
