"""The store as one file of SQLite, which several processes of one machine may have open (WAL).

A transaction is written to the file's log, but not synced to the disk (`sync` does that): it survives the end of a
process, also by kill -9; what was written last before a power cut may be lost, and the file is whole in any case.

The logs of running streams are files in the same folder: `STORE-streams-OWNER-K` is an empty file, the log's fence, and
`STORE-streams-OWNER-K.N` is part N of that log. A write to them survives the end of its process, as a write to the
store does. After a power cut, the end of a log may be missing, with bytes that clients have got. To detect this, the
name of an owner contains the boot id of its machine.
"""

import errno
import os
import re
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

from frontend.kept.database import BUSY_S, SCHEMA, STORED_INDEX, VERSION, Connection, LogGone, LogPart

MAGIC = b"SQLite format 3\0"  # how every file of SQLite begins
OWN_TABLES = {"answers", "pieces"}  # tables that every store has, since its first version
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another one whenever the machine starts; Linux has it
BOOT_CHARS = 8
DELETED = "the file was deleted, or another one is in its place"
LOCKED_S = 0.01  # pause between two attempts to get a lock for which SQLite does not wait


class SQLite:
    """A Database."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    refusals: tuple[type[Exception], ...] = (sqlite3.IntegrityError,)

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._opened: Identity = None

    def start_problem(self) -> str:
        problem = not_a_file(self.path) or another_programs(self.path)
        return f"{problem}; name another file, which is made if there is none" if problem else ""

    def open(self) -> Connection:
        db = open_file(self.path)
        self._opened = identity(self.path)
        return cast(Connection, db)

    def check(self, db: Connection) -> None:
        if identity(self.path) != self._opened:
            raise sqlite3.DatabaseError(DELETED)

    def begin(self, db: Connection) -> None:
        # A transaction that begins as a writer waits for others; one that becomes a writer later would fail instead.
        db.execute("BEGIN IMMEDIATE")

    def is_usable(self, db: Connection, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError)  # it is full, busy or read-only; else it is damaged

    def describe(self, error: Exception) -> str:
        return str(error) if self.name in str(error) else f"{self.name}: {error}"

    def sync(self, db: Connection) -> None:
        with suppress(FileNotFoundError):  # there is no log, so nothing has been written
            _sync(self.path.with_name(f"{self.path.name}-wal"))

    def used_bytes(self, db: Connection) -> int:
        size, pages, free = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (pages - free))

    def tidy(self, db: Connection) -> None:
        db.execute("PRAGMA incremental_vacuum").fetchall()

    def logbook(self) -> "LogFiles":
        return LogFiles(self.path)


Identity = tuple[int, int] | None


def identity(path: Path) -> Identity:
    """Returns what no other file has while this one is open; None: there is no file, or it cannot be reached."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def boot() -> str:
    """Returns what names this run of the machine, from its start to its stop; empty if the system does not tell."""
    try:
        return BOOT_ID.read_text()[:BOOT_CHARS]
    except OSError:
        return ""


def open_file(path: Path) -> sqlite3.Connection:
    """Opens the file, which is made if there is none: for its owner only. Raises sqlite3.Error and OSError.

    What is not a store (a folder, a device, another program's file) keeps its permissions.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # closing a descriptor of the file would release the locks that SQLite holds on it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    info = path.stat()
    if problem := not_a_file(path) or another_programs(path):
        raise OSError(errno.EINVAL, problem, str(path))
    if info.st_uid == os.geteuid() and info.st_mode & 0o077 and _begins_as_a_store(path):
        path.chmod(0o600)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.create_function("clock", 0, time.time)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _log_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= version <= VERSION:
            raise sqlite3.DatabaseError(f"the file has version {version} of the store, this server has {VERSION}")
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        if version != VERSION:
            _raise_version(db)
    except sqlite3.Error:
        db.close()
        raise
    return db


def not_a_file(path: Path) -> str:
    """Says why no store can be at a path: that it is a folder or a device; empty if one can be there."""
    if path.is_dir():
        return "it is a folder"
    return "it is no regular file" if path.exists() and not path.is_file() else ""


def another_programs(path: Path) -> str:
    """Says that a file is the database of another program, which must not get our tables; empty for all others.

    A file that is no database of SQLite may be a damaged store. Opening it fails and does not change it. Nor does this.
    """
    if not path.is_file() or not path.stat().st_size or not _begins_as_a_store(path):
        return ""
    log = path.with_name(f"{path.name}-wal")
    # Without a log, SQLite is told that the file does not change, so that it makes no files for it.
    how = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return ""
    if not tables or tables >= OWN_TABLES:
        return ""
    return f"it is a database of another program, with the table {min(tables)!r:.80}"


def _begins_as_a_store(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) in (b"", MAGIC)


def _raise_version(db: sqlite3.Connection) -> None:
    """Gives a new file its version, and a file of version 1 what it lacks. Pieces that it has are not checked.

    Version 3 has pieces with the tokens of several writes.
    """
    db.execute("BEGIN IMMEDIATE")
    if "crc" not in [column[1] for column in db.execute("PRAGMA table_info(pieces)")]:
        db.execute("ALTER TABLE pieces ADD COLUMN crc INTEGER")
        db.execute("ALTER TABLE answers ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0")
        db.execute(
            "UPDATE answers SET bytes = length(body) + length(recipe) + coalesce(length(response), 0) + "
            "(SELECT coalesce(sum(length(data) + length(tokens)), 0) FROM pieces WHERE answer = id)"
        )
    db.execute(STORED_INDEX)
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def _log_ahead(db: sqlite3.Connection) -> None:
    """Switches to WAL. Retries, because several processes may start together and SQLite does not wait for this lock."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
            time.sleep(LOCKED_S)
        else:
            return


# the logs of running streams


class LogFile:
    """A LogWriter. The file that is written is part `_part` of the log."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, fence: Path, store: Path) -> None:
        self.path, self.name = fence, str(fence)
        self._store, self._belongs_to = store, identity(store)
        self._fence = self._file = self._part = -1

    def make(self) -> None:
        self._fence, self._belongs_to = _made(self.path), identity(self._store)

    def is_lost(self) -> bool:
        return self._fence >= 0 and identity(self._store) != self._belongs_to

    def write(self, part: int, frame: bytes) -> bool:
        if self.is_lost():
            raise LogGone(f"{self._store}: {DELETED}")
        if part != self._part:
            self._close_part()
            self._file, self._part = _made(self.path.with_name(f"{self.path.name}.{part}")), part
        length, left = os.fstat(self._file).st_size, memoryview(frame)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, length)
            raise
        owned = bool(os.fstat(self._fence).st_nlink)
        if owned and not os.fstat(self._file).st_nlink:
            raise LogGone(f"{self.name}: a file of running streams was deleted")
        return owned

    def describe(self, error: Exception) -> str:
        return f"{self.name}: {error.strerror if isinstance(error, OSError) else error}"

    def close(self) -> None:
        self._close_part()
        if self._fence >= 0:
            os.close(self._fence)
        self._fence = -1

    def _close_part(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = self._part = -1


class LogFiles:
    """A Logbook: the files beside a store. It needs no connection."""

    def __init__(self, store: Path) -> None:
        self._store, self._boot = store, boot()
        self._name = re.compile(re.escape(store.name) + r"-streams-(?P<owner>.+)-(?P<log>\d+)(?:\.(?P<part>\d+))?")

    def owner(self, process: str) -> str:
        return f"{process}.{self._boot}"

    def survived(self, owner: str) -> bool:
        return owner.partition(".")[2] in ("", self._boot)

    def path(self, part: LogPart) -> Path:
        suffix = "" if part.part is None else f".{part.part}"
        return self._store.with_name(f"{self._store.name}-streams-{part.owner}-{part.log}{suffix}")

    def writer(self, owner: str, log: int) -> LogFile:
        return LogFile(self.path(LogPart(owner, log, None)), self._store)

    def parts(self, db: Connection) -> list[LogPart]:
        found = []
        for name in os.listdir(self._store.parent):
            if which := self._name.fullmatch(name):
                part = None if which["part"] is None else int(which["part"])
                found.append(LogPart(which["owner"], int(which["log"]), part))
        return found

    def read(self, db: Connection, part: LogPart, start: int) -> bytes:
        with suppress(FileNotFoundError), self.path(part).open("rb") as file:
            file.seek(start)
            return file.read()
        return b""

    def remove_fence(self, db: Connection, fence: LogPart) -> None:
        self.path(fence).unlink(missing_ok=True)

    def delete(self, db: Connection, parts: Iterable[LogPart]) -> None:
        for part in parts:
            with suppress(OSError):
                self.path(part).unlink()


def _made(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
