"""The folder in /dev/shm through which --prefill-workers hand prompts over if no --kv-store is named.

It is memory: it is private to its user, and removed when the server ends. A locked file shows that the server is alive.
If a server is killed without a chance to clean up, the next server that makes such a folder removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values

SHARED_MEMORY = Path("/dev/shm")
MOST_GB, SHARE = 4.0, 0.5  # its size without --kv-store-gb: 4 GiB, or half of what is free, if that is less
LEAST_GB = 0.03  # less room hands nothing over
_PREFIX, _GIB = "sluice-kv-", 1 << 30


@contextlib.contextmanager
def with_store(settings: Settings, explicit: Collection[str], parent: Path = SHARED_MEMORY) -> Iterator[Settings]:
    """Yields the settings with a new folder as --kv-store if the workers need one; else the settings as they are.

    explicit: names of the settings that the user gave. Raises ConfigError if there is no such folder, or no room.
    """
    if not settings.launch.prefill_workers or settings.worker.kv_store:
        yield settings
        return
    _remove_dead(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"--prefill-workers needs --kv-store: a folder in {parent} cannot be made ({error.strerror})"
        ) from error
    try:
        with _locked(folder):
            free = shutil.disk_usage(folder).free / _GIB
            size = settings.worker.kv_store_gb if "kv_store_gb" in explicit else f"{min(MOST_GB, SHARE * free):.3f}"
            if float(size) < LEAST_GB or free < LEAST_GB:
                raise ConfigError(
                    f"--prefill-workers needs --kv-store: {parent} has room for {free:.3f} GiB only, too little for it"
                )
            yield with_values(settings, {"kv_store": str(folder / "kv"), "kv_store_gb": size})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def _remove_dead(parent: Path) -> None:
    """Removes the folders of servers that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # the lock file is empty while its server is starting
            if folder.stat().st_uid != os.geteuid() or not (folder / "lock").stat().st_size:
                continue
            with (folder / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
