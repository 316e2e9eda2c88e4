"""Files of models that clients upload: written as they arrive, hashed meanwhile, and renamed when they are whole.

A file is named by its SHA-256 alone, so no client chooses a path. Until it is whole it has another name, under which
nobody looks for it; it is removed when the upload ends early, and after a crash by the next upload. Methods block, so
they are for threads.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frontend.errors import BadRequest, Overloaded, TooLarge
from shared.config.declaration import ConfigError
from shared.model_library import library_file, read_library
from shared.private_files import private_folder

MAGIC = b"GGUF"
SPARE_BYTES = 1 << 30  # of the disk stay free
UNNAMED_S = 24 * 3600.0  # a file that no model has for so long is removed
STARTING_S = 60.0  # after so long, an upload holds the lock of its file
PARTS, WHOLE = ".part-*", "sha256-*.gguf"
MOST_AT_ONCE, MOST_OF_A_TENANT = 4, 2  # uploads of a process
RETRY_S = 10.0


class Arriving:
    """How many uploads run in this process, and whose."""

    def __init__(self) -> None:
        self._of_tenants: Counter[str] = Counter()

    @contextmanager
    def one_more(self, tenant: str) -> Iterator[None]:
        """Counts an upload in the block. Raises Overloaded."""
        running = self._of_tenants.total()
        if running >= MOST_AT_ONCE or self._of_tenants[tenant] >= MOST_OF_A_TENANT:
            raise Overloaded(f"{running} files are uploaded already: try again later", code="busy", retry_after=RETRY_S)
        self._of_tenants[tenant] += 1
        try:
            yield
        finally:
            self._of_tenants[tenant] -= 1


class Upload:
    """A file that arrives. Ends with `finish` or `close`."""

    def __init__(self, target: Path, most: int, announced: int = 0) -> None:
        """target: of `uploaded_file`; most: bytes of all uploads together; announced: of this one, 0 if not known

        Raises TooLarge if there is no room, and OSError.
        """
        self._target, self._most = target, most
        self._hash, self._size = hashlib.sha256(), 0
        self._lock, self._closed = threading.Lock(), False  # a cancelled request closes while a thread still writes
        self._folder = private_folder(target.parent)
        remove_forgotten(self._folder)
        self._check_room(announced)
        self._part = self._folder / f".part-{secrets.token_hex(16)}"
        self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes) -> None:
        """Adds the next bytes. Raises BadRequest for what is no GGUF file, TooLarge, and OSError."""
        with self._lock:
            if not self._closed:
                self._write(data)

    def _write(self, data: bytes) -> None:
        if self._size == 0 and not data.startswith(MAGIC):
            raise BadRequest("the file is not in the format GGUF: nothing else can be uploaded", code="not_gguf")
        self._check_room(len(data))
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> int:
        """Gives the file its name, and returns its bytes. Raises BadRequest if it has another digest, and OSError."""
        if self._target.name != f"sha256-{self._hash.hexdigest()}.gguf":
            raise BadRequest(
                f"the {self._size} bytes that arrived have the digest sha256:{self._hash.hexdigest()}",
                code="digest_mismatch",
            )
        os.fsync(self._file)  # the digest is not checked again
        self._part.replace(self._target)
        return self._size

    def close(self) -> None:
        """Removes what is not finished."""
        with self._lock:
            self._closed = True
            os.close(self._file)
            _remove(self._part)

    def _check_room(self, more: int) -> None:
        used = sum(size for _, size, _ in _files(self._folder, PARTS, WHOLE))
        if used + more > self._most:
            raise TooLarge(
                f"all uploads together may have {self._most / 2**30:g} GiB (--upload-gb), and there are "
                f"{used / 2**30:.2f}: delete models that were uploaded", code="storage_limit",
            )  # fmt: skip
        if shutil.disk_usage(self._folder).free - more < SPARE_BYTES:
            raise TooLarge("the disk is full but for the GiB that stays free", code="disk_full")


def is_here(target: Path) -> bool:
    """Returns whether a file was uploaded, and keeps it for a day although no model has it yet."""
    with suppress(OSError):
        os.utime(target, follow_symlinks=False)
        return target.is_file() and not target.is_symlink()
    return False


def remove_forgotten(folder: Path, now: float | None = None) -> None:
    """Removes parts whose server has ended, and files that no model has had for a day."""
    now = time.time() if now is None else now
    for file, _, changed in _files(folder, PARTS):
        if now - changed > STARTING_S and _is_unlocked(file):
            _remove(file)
    old = [file for file, _, changed in _files(folder, WHOLE) if now - changed > UNNAMED_S]
    with suppress(ConfigError):  # a library that cannot be read may name all of them
        named = {one.model for one in read_library(library_file()).pulled.values()} if old else set()
        for file in old:
            if str(file) not in named:
                _remove(file)


def _files(folder: Path, *patterns: str) -> list[tuple[Path, int, float]]:
    """Returns the files with these names, their bytes, and when they were changed."""
    found = []
    for file in (file for pattern in patterns for file in folder.glob(pattern)):
        with suppress(OSError):
            info = file.lstat()
            found.append((file, info.st_size, info.st_mtime))
    return found


def _is_unlocked(file: Path) -> bool:
    with suppress(OSError):
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(opened)
    return file.is_symlink()


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()
