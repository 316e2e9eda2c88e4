"""The store: one SQLite file, and the thread that alone reads and writes it.

The event loop never waits for the disk. A caller hands in a function that takes the connection; all functions that have
come meanwhile are run together, in one transaction. So a write costs the loop some microseconds, and many
streams share one commit. Several processes of one machine may have the same file open (WAL).

A transaction is written to the file's log, but not synced to the disk: it survives the end of a process, also by
kill -9; what was written last before a power cut may be lost, and the file is whole in any case.

Knows no answer: the tables are in SCHEMA, and answers.py, conversations.py, files.py and batches.py read and write
them.
"""

import asyncio
import errno
import logging
import os
import queue
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from frontend.errors import Internal, Overloaded
from shared.config.declaration import ConfigError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

log = logging.getLogger("sluice.frontend")
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, stream_id TEXT, path TEXT NOT NULL, created INTEGER NOT NULL,
    status TEXT NOT NULL, ended REAL, background INTEGER NOT NULL, listed INTEGER NOT NULL,
    body BLOB NOT NULL, recipe BLOB NOT NULL, response BLOB, owner TEXT NOT NULL, epoch INTEGER NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS answers_stream ON answers (tenant, stream_id) WHERE stream_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS answers_running ON answers (owner) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS answers_ended ON answers (ended);
CREATE TABLE IF NOT EXISTS pieces (
    answer TEXT NOT NULL, number INTEGER NOT NULL, at INTEGER NOT NULL, data BLOB NOT NULL, tokens BLOB NOT NULL,
    crc INTEGER, PRIMARY KEY (answer, number)
);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, used REAL NOT NULL, metadata BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    conversation TEXT NOT NULL, at INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL,
    PRIMARY KEY (conversation, at)
);
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, expires REAL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, whole INTEGER NOT NULL, batch TEXT NOT NULL, states TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS file_parts (
    file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, format TEXT NOT NULL, status TEXT NOT NULL, created INTEGER NOT NULL,
    expires REAL NOT NULL, ended REAL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, metadata BLOB NOT NULL,
    times BLOB NOT NULL, errors BLOB NOT NULL, total INTEGER NOT NULL, input_bytes INTEGER NOT NULL,
    keep_output_s REAL, output_file TEXT NOT NULL, error_file TEXT NOT NULL, owner TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_open ON batches (created) WHERE ended IS NULL;
CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL, state TEXT NOT NULL,
    owner TEXT NOT NULL, failures INTEGER NOT NULL, output BLOB NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (batch, number)
);
CREATE INDEX IF NOT EXISTS batch_lines_waiting ON batch_lines (batch, number) WHERE state = 'waiting';
CREATE INDEX IF NOT EXISTS batch_lines_states ON batch_lines (batch, state, bytes);
CREATE TABLE IF NOT EXISTS owners (id TEXT PRIMARY KEY, seen REAL NOT NULL);
"""
MAGIC = b"SQLite format 3\0"  # how every file of SQLite begins
VERSION = 3  # of the schema, in the file's user_version
AT_ONCE = 1024  # how many functions share a transaction at most
BEAT_S = 1.0  # interval at which a process shows that it lives
DEAD_S = 6.0  # a process that has not shown itself for this long has lost its answers to the others
SWEEP_S = 60.0  # interval between two deletions of what is too old or too much
SWEEP_ROWS = 64  # how many answers are deleted at a time, before the size is looked at again
RETRY_S = 5.0  # pause before a file that could not be opened is tried again
BUSY_S = 5.0  # how long a transaction waits for another process
LOCKED_S = 0.01  # pause between two attempts to get a lock for which SQLite does not wait
UPLOAD_S = 3600.0  # an upload that has not ended after this long is deleted
STOP: Any = None


class StoreError(Overloaded):
    """The store cannot be read or written now. The message says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the store of answers cannot be used: {problem}", code="store_unavailable", retry_after=5.0)


class Damaged(StoreError):
    """What is asked for has other bytes in the file than were written."""

    status, kind = Internal.status, Internal.kind

    def __init__(self, problem: str = "it is damaged in the file") -> None:
        super().__init__(problem)
        self.code = "answer_damaged"


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    writes: bool
    done: "Callable[[Any, StoreError | None], None]"
    value: Any = None
    error: StoreError | None = None


class Store:
    """The file of one server. `problem` says why it cannot be used; empty while it can."""

    def __init__(self, path: Path, owner: str, *, max_age_s: float, max_bytes: int) -> None:
        """
        owner: the id of this process, which no other process ever has
        max_age_s: ended answers that are older are deleted; 0: no limit
        max_bytes: the oldest ended answers are deleted while the file has more bytes in use; 0: no limit
        """
        self.path, self.owner, self.problem = path, owner, ""
        self._max_age_s, self._max_bytes = max_age_s, max_bytes
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._db: sqlite3.Connection | None = None
        self._opened_at = self._beaten_at = self._swept_at = -1e9

    def start(self) -> None:
        """Starts the thread. The calling loop gets all results."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread after everything that was handed in before."""
        if self._thread.is_alive():
            self._jobs.put(STOP)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, BUSY_S)

    async def read(self, work: Work[T]) -> T:
        """Returns what `work` returns. Raises StoreError."""
        return await self._awaited(work, writes=False)

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction, and returns its result when it is committed. Raises StoreError."""
        return await self._awaited(work, writes=True)

    def post(self, work: Work[T], done: Callable[[T, StoreError | None], None]) -> None:
        """Runs `work` in a transaction; then calls `done` in the loop with the result, or with an error."""
        self._jobs.put(_Job(work, True, done))

    def insist(self, work: Work[Any]) -> None:
        """Runs `work` in a transaction, as soon as the store can be written."""

        def done(value: Any, error: StoreError | None) -> None:
            if error is not None:
                self._loop.call_later(RETRY_S, self.insist, work)

        self.post(work, done)

    async def _awaited(self, work: Work[T], *, writes: bool) -> T:
        result: asyncio.Future[T] = self._loop.create_future()

        def done(value: T, error: StoreError | None) -> None:
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        self._jobs.put(_Job(work, writes, done))
        return await result

    # the thread

    def _run(self) -> None:
        stopped = False
        while not stopped:
            jobs = self._next_jobs()
            stopped = STOP in jobs
            jobs = [job for job in jobs if job is not STOP]
            self._do(jobs)
            if jobs:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(_deliver, jobs)
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.execute("DELETE FROM owners WHERE id = ?", (self.owner,))
            self._close()

    def _next_jobs(self) -> list[_Job]:
        jobs: list[_Job] = []
        with suppress(queue.Empty):
            jobs.append(self._jobs.get(timeout=BEAT_S))
            while len(jobs) < AT_ONCE and jobs[-1] is not STOP:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _do(self, jobs: list[_Job]) -> None:
        """Writes first, so that a read sees every write that was handed in before it. Reads go on if writes fail."""
        writes, reads = [job for job in jobs if job.writes], [job for job in jobs if not job.writes]
        for part, act in ((writes, self._write), (reads, _read)):
            try:
                act(self._opened(), part)
            except (sqlite3.Error, OSError) as exc:
                self._failed(exc)
                for job in part:
                    job.error = StoreError(self.problem)

    def _opened(self) -> sqlite3.Connection:
        """Returns the connection. While there is a problem, opens the file anew every RETRY_S."""
        now = time.monotonic()
        due = now - self._opened_at >= RETRY_S
        if self._db is not None and not (self.problem and due):
            return self._db
        if not due:
            raise OSError(self.problem)
        self._opened_at = now
        self._close()
        self._db = open_file(self.path)
        return self._db

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = None

    def _failed(self, exc: Exception) -> None:
        """Notes why the store cannot be used, and logs it once. A damaged file is closed and tried again later."""
        problem = str(exc) if str(self.path) in str(exc) else f"{self.path}: {exc}"
        if problem != self.problem:
            log.error("answers are not kept, but given: %s", problem)
        self.problem = problem
        if not isinstance(exc, sqlite3.OperationalError):  # else it is full, busy or read-only, and can be read
            self._close()
        elif self._db is not None:
            with suppress(sqlite3.Error):
                self._db.rollback()

    def _write(self, db: sqlite3.Connection, jobs: list[_Job]) -> None:
        beaten = self._upkeep(db)
        if jobs:
            self._transact(db, jobs)
        if self.problem and (beaten or jobs):
            self.problem = ""
            log.info("the store of answers %s can be used again", self.path)

    def _transact(self, db: sqlite3.Connection, jobs: list[_Job]) -> None:
        """Runs all in one transaction. One that fails does not undo the others."""
        db.execute("BEGIN IMMEDIATE")
        for job in jobs:
            db.execute("SAVEPOINT job")
            _attempt(db, job)
            if job.error is not None:
                db.execute("ROLLBACK TO job")
            db.execute("RELEASE job")
        db.execute("COMMIT")

    def _upkeep(self, db: sqlite3.Connection) -> bool:
        """Shows that this process lives, and deletes what is too old. Returns whether something was written."""
        now = time.monotonic()
        beats = now - self._beaten_at >= BEAT_S
        if beats:
            db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (self.owner, time.time()))
            self._beaten_at = now
        if now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            sweep(db, self._max_age_s, self._max_bytes)
        return beats


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        job.done(job.value, job.error)


def _read(db: sqlite3.Connection, jobs: list[_Job]) -> None:
    for job in jobs:
        _attempt(db, job)


def _attempt(db: sqlite3.Connection, job: _Job) -> None:
    """Runs the work of a job. An error of the file itself is raised, because it concerns all jobs."""
    try:
        job.value = job.work(db)
    except sqlite3.Error:
        raise
    except StoreError as exc:
        job.error = exc
    except Exception as exc:
        log.exception("a read or write of the store failed")
        job.error = StoreError(f"{type(exc).__name__}: {exc}")


def open_file(path: Path) -> sqlite3.Connection:
    """Opens the file, which is made if there is none: for its owner only. Raises sqlite3.Error and OSError.

    What is not a store (a folder, a device, another program's file) keeps its permissions.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a file of this process must not be closed beside SQLite: its locks would go
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    info = path.stat()
    if problem := not_a_file(path):
        raise OSError(errno.EINVAL, problem, str(path))
    if info.st_uid == os.geteuid() and info.st_mode & 0o077 and _begins_as_a_store(path):
        path.chmod(0o600)
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _log_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= version <= VERSION:
            raise sqlite3.DatabaseError(f"the file has version {version} of the store, this server has {VERSION}")
        # A transaction that begins as a writer waits for others; one that becomes a writer fails at once beside them.
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        if version != VERSION:
            _raise_version(db)
    except sqlite3.Error:
        db.close()
        raise
    return db


def check_store(path: str) -> None:
    """Raises ConfigError if a server is to be started with a folder or a device as its store.

    One that lies there later is as any other store that cannot be used: the server goes on without it.
    """
    if problem := not_a_file(Path(path)):
        raise ConfigError(f"--store {path}: {problem}; name a file, which is made if there is none")


def not_a_file(path: Path) -> str:
    """Says why no store can be at a path: that it is a folder or a device; empty if one can be there."""
    if path.is_dir():
        return "it is a folder"
    return "it is no regular file" if path.exists() and not path.is_file() else ""


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
    db.execute("CREATE INDEX IF NOT EXISTS answers_stored ON answers (tenant, bytes)")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def _log_ahead(db: sqlite3.Connection) -> None:
    """Switches to WAL. Processes that start together do so at once, and SQLite itself does not wait for that lock."""
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


def packed(text: bytes) -> bytes:
    """Returns a text as the file has it: compressed, with a checksum. An empty one stays empty."""
    return zlib.compress(text, 1) if text else b""


def unpacked(data: bytes) -> bytes:
    """Returns a text of the file. Raises Damaged if its bytes have changed there."""
    if data[:1] in (b"", b"{", b"["):  # JSON, as files of version 1 have it
        return data
    try:
        return zlib.decompress(data)
    except zlib.error:
        raise Damaged from None


def used_bytes(db: sqlite3.Connection) -> int:
    """Returns the bytes of the file that are in use."""
    size, pages, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))


def sweep(db: sqlite3.Connection, max_age_s: float, max_bytes: int) -> None:
    """Deletes ended answers, conversations, files and batches that are too old, then the oldest answers while there is
    too much."""
    now = time.time()
    if max_age_s:
        while _delete(db, "ended < ?", now - max_age_s):
            pass
        old = [one for (one,) in db.execute("SELECT id FROM conversations WHERE used < ?", (now - max_age_s,))]
        db.executemany("DELETE FROM items WHERE conversation = ?", [(one,) for one in old])
        db.executemany("DELETE FROM conversations WHERE id = ?", [(one,) for one in old])
    _sweep_batches(db, now, max_age_s)
    while max_bytes and used_bytes(db) > max_bytes and _delete(db, "ended IS NOT NULL"):
        pass
    db.execute("DELETE FROM owners WHERE seen < ?", (now - 3600,))
    db.execute("PRAGMA incremental_vacuum").fetchall()


def _sweep_batches(db: sqlite3.Connection, now: float, max_age_s: float) -> None:
    """Deletes ended batches that are too old, and files that are too old, have expired, or never became whole.

    The input of a batch that waits to be read stays. An output file goes with its batch.
    """
    oldest = now - max_age_s if max_age_s else 0.0
    ended = db.execute("SELECT id FROM batches WHERE ended < ?", (oldest,)).fetchall()
    for table, column in (("batch_lines", "batch"), ("files", "batch"), ("batches", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", ended)
    old = db.execute(
        "SELECT id FROM files WHERE (expires < ? OR (batch = '' AND created < ?) OR (NOT whole AND created < ?)) "
        "AND id NOT IN (SELECT input_file FROM batches WHERE ended IS NULL)",
        (now, oldest, now - UPLOAD_S),
    ).fetchall()  # fmt: skip
    db.executemany("DELETE FROM file_parts WHERE file = ?", old)
    db.executemany("DELETE FROM files WHERE id = ?", old)


def _delete(db: sqlite3.Connection, which: str, *values: float) -> bool:
    """Deletes the oldest of these answers. Returns whether there were any."""
    rows = db.execute(f"SELECT id FROM answers WHERE {which} ORDER BY ended LIMIT {SWEEP_ROWS}", values).fetchall()
    db.execute("BEGIN IMMEDIATE")
    db.executemany("DELETE FROM pieces WHERE answer = ?", rows)
    db.executemany("DELETE FROM answers WHERE id = ?", rows)
    db.execute("COMMIT")
    return bool(rows)
