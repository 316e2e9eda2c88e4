"""The files of a record: FILE, to which lines are added, and older files, from FILE.1 (the newest of them) upwards.

Several processes may add to one record. The process that finds FILE full renames all files; a lock keeps the other
processes from doing the same. The other processes then notice that FILE is a new file, and open it. Lines that they
add before that are in FILE.1.
If renaming fails, lines are still added to the open file.
"""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from shared.logs.line_writer import write_all
from shared.logs.record import older_files


class RecordFiles:
    """Writes to the newest file. When it is full, renames all files, but never files without a size, such as pipes."""

    def __init__(self, path: str, max_bytes: int, count: int) -> None:
        """Opens the file, which only its owner may read. Raises OSError, also if the file is another user's.

        max_bytes: the size at which the newest file is full; 0: no limit
        count: how many files are kept, including the newest
        """
        self._path = Path(path).resolve()
        self._max_bytes, self._count = max_bytes, count
        self._descriptor = self._open()
        self._rotates = stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def write(self, data: bytes) -> int:
        """Writes lines; returns how many bytes of whole lines were written, which are fewer if the disk is full."""
        if self._rotates:
            with suppress(OSError):
                self._reopen_if_replaced()
                size = os.fstat(self._descriptor).st_size
                if self._max_bytes and size and size + len(data) > self._max_bytes:
                    self._rename()
                    self._reopen_if_replaced()
        return write_all(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_uid != os.geteuid():
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it belongs to another user", str(self._path))
        if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        return descriptor

    def _is_current(self) -> bool:
        """Returns whether the open file still has the record's name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _reopen_if_replaced(self) -> None:
        if not self._is_current():
            old, self._descriptor = self._descriptor, self._open()
            os.close(old)  # closing the file also releases its lock

    def _rename(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process renames the files
            return
        if not self._is_current():
            return
        for number, file in sorted(older_files(self._path).items(), reverse=True):
            if number + 1 < self._count:
                file.rename(self._named(number + 1))
            else:
                file.unlink()
        if self._count > 1:
            self._path.rename(self._named(1))
        else:
            self._path.unlink()

    def _named(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
