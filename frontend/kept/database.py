"""The interface of a store's database: connections that take one dialect of SQL, and operations that differ between
SQLite and Postgres.

The tables are in SCHEMA. All statements of this package are written once, in what SQLite and Postgres both understand:
parameters are `?` or `:name`, flags are BOOLEAN, an upsert is `ON CONFLICT`, and `clock()` is the time in seconds since
1970 by the clock that all processes with the same database share. `rowid` grows with each row of the tables that
have it. sqlite.py and postgres.py have the rest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.errors import Internal, Overloaded

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, stream_id TEXT, path TEXT NOT NULL, created INTEGER NOT NULL,
    status TEXT NOT NULL, ended REAL, background BOOLEAN NOT NULL, listed BOOLEAN NOT NULL,
    body BLOB NOT NULL, recipe BLOB NOT NULL, response BLOB, owner TEXT NOT NULL, epoch INTEGER NOT NULL,
    cancelled BOOLEAN NOT NULL DEFAULT FALSE, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS answers_stream ON answers (tenant, stream_id) WHERE stream_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS answers_running ON answers (owner) WHERE ended IS NULL;
CREATE INDEX IF NOT EXISTS answers_ended ON answers (ended);
CREATE INDEX IF NOT EXISTS answers_oldest ON answers (tenant, ended) WHERE ended IS NOT NULL;
CREATE TABLE IF NOT EXISTS pieces (
    answer TEXT NOT NULL, number INTEGER NOT NULL, at INTEGER NOT NULL, data BLOB NOT NULL, tokens BLOB NOT NULL,
    crc INTEGER, PRIMARY KEY (answer, number)
);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, used REAL NOT NULL, metadata BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS conversations_tenant ON conversations (tenant);
CREATE TABLE IF NOT EXISTS items (
    conversation TEXT NOT NULL, at INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL,
    PRIMARY KEY (conversation, at)
);
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, expires REAL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, whole BOOLEAN NOT NULL, batch TEXT NOT NULL, states TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS files_tenant ON files (tenant);
CREATE TABLE IF NOT EXISTS file_parts (
    file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, format TEXT NOT NULL, status TEXT NOT NULL, created INTEGER NOT NULL,
    expires REAL NOT NULL, ended REAL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, metadata BLOB NOT NULL,
    times BLOB NOT NULL, errors BLOB NOT NULL, total INTEGER NOT NULL, input_bytes INTEGER NOT NULL,
    keep_output_s REAL, output_file TEXT NOT NULL, error_file TEXT NOT NULL, owner TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_tenant ON batches (tenant, created);
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
STORED_INDEX = "CREATE INDEX IF NOT EXISTS answers_stored ON answers (tenant, bytes)"
VERSION = 3  # of the schema
BUSY_S = 5.0  # how long a transaction waits for another process

Values = Sequence[Any] | Mapping[str, Any]


class StoreError(Overloaded):
    """The store cannot be read or written now. The message says why.

    uncertain: whether the transaction may have been committed all the same, because its answer was lost
    """

    def __init__(self, problem: str, *, uncertain: bool = False) -> None:
        super().__init__(f"the store of answers cannot be used: {problem}", code="store_unavailable", retry_after=5.0)
        self.uncertain = uncertain


class Damaged(StoreError):
    """What is asked for has other bytes in the store than were written."""

    status, kind = Internal.status, Internal.kind

    def __init__(self, problem: str = "it is damaged in the store") -> None:
        super().__init__(problem)
        self.code = "answer_damaged"


class Cursor(Protocol):
    """What a statement has found; rowcount: how many rows it has changed"""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection, on which each statement is a transaction unless `Database.begin` has begun one."""

    def execute(self, sql: str, values: Values = ..., /) -> Cursor: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor: ...
    def rollback(self) -> None:
        """Ends a transaction, if there is one, without its effects."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LogPart:
    """A part of the log `log` of a process, which is read and deleted as a whole. part: None is the log's fence"""

    owner: str
    log: int
    part: int | None


class LogWriter(Protocol):
    """Where a log of a process is written (stream_log.py).

    name: what messages call it
    errors: what its methods raise when the log cannot be written

    `write` and `close` run in the log's thread.
    """

    name: str
    errors: tuple[type[Exception], ...]

    def make(self) -> None:
        """Makes the fence, before anything is written. In the store's thread. It may be tried again after an error."""

    def is_lost(self) -> bool:
        """Whether `write` would raise LogGone. In any thread."""

    def write(self, part: int, frame: bytes) -> bool:
        """Adds a frame to a part of the log. Returns whether it may be shown: whether the fence was there.

        Raises LogGone, or one of `errors`: then the part is not to get more, and has no half of the frame.
        """

    def describe(self, error: Exception) -> str:
        """Returns an error in one line."""

    def close(self) -> None: ...


class LogGone(Exception):
    """What was written of a log may be lost: nothing more can be kept with it. The message says why."""


class Logbook(Protocol):
    """The logs of all processes. For the store's thread."""

    def owner(self, process: str) -> str:
        """Returns the name under which a process is to own answers."""

    def survived(self, owner: str) -> bool:
        """Whether the logs of a process have all that it has shown: not if its machine has stopped since."""

    def writer(self, owner: str, log: int) -> LogWriter: ...
    def parts(self, db: Connection) -> list[LogPart]:
        """Returns all parts, fences included, in order."""

    def read(self, db: Connection, part: LogPart, start: int) -> bytes:
        """Returns the bytes of a part from the offset `start` on; empty if there are none."""

    def remove_fence(self, db: Connection, fence: LogPart) -> None:
        """From now on the process of this log shows nothing more that is not in it."""

    def delete(self, db: Connection, parts: Iterable[LogPart]) -> None:
        """Deletes parts, as far as that is possible now."""


class Database(Protocol):
    """A file of SQLite, or a database of Postgres.

    name: what messages call it, without a password
    errors: what its connections raise
    refusals: those of `errors` that concern one statement; others concern all that is done with the connection
    """

    name: str
    errors: tuple[type[Exception], ...]
    refusals: tuple[type[Exception], ...]

    def start_problem(self) -> str:
        """Says why no server is to be started with this store; empty: it is there, or may be later."""

    def open(self) -> Connection:
        """Opens a connection, and makes the tables if there are none. Raises OSError, too."""

    def check(self, db: Connection) -> None:
        """Raises one of `errors` if the connection's database is not the one that others open now."""

    def begin(self, db: Connection) -> None:
        """Begins a transaction that excludes those of other processes."""

    def is_usable(self, db: Connection, error: Exception) -> bool:
        """Whether a connection can still be read after an error."""

    def describe(self, error: Exception) -> str:
        """Returns an error in one line that names the database."""

    def sync(self, db: Connection) -> None:
        """Makes what was committed survive a power cut. Raises OSError, too."""

    def used_bytes(self, db: Connection) -> int:
        """Returns the bytes that are in use, for --store-max-bytes."""

    def tidy(self, db: Connection) -> None:
        """Frees the disk space of what was deleted."""

    def logbook(self) -> Logbook: ...


@contextmanager
def transaction(database: Database, db: Connection) -> Iterator[None]:
    """Commits what is done within, or undoes it after an exception."""
    database.begin(db)
    try:
        yield
    except BaseException:
        db.rollback()
        raise
    db.execute("COMMIT")
