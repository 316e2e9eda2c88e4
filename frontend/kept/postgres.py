"""The store in a Postgres, which the frontends of several hosts share.

A process has two connections: the store's, and one that writes its log of running streams. Everything lies in the
schema `sluice`. SQLite's writers take turns, and what the statements of this package check before they write relies on
that; here a lock of the database does the same.

The logs of running streams are rows: `log_parts` has the parts, and a fence for each log, and `log_frames` what was
written. A frame is inserted only where the fence is, and locks its row; a process that takes over deletes that row. So
it either waits for the frame and then reads it, or the frame is never written.
"""

import re
import time
from collections.abc import Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from frontend.kept.database import (
    BUSY_S,
    SCHEMA,
    STORED_INDEX,
    VERSION,
    Connection,
    Cursor,
    LogGone,
    LogPart,
    Values,
)
from shared.config.declaration import ConfigError

T = TypeVar("T")
MISSING_PACKAGE = "--store with a URL of Postgres needs `pip install 'sluice-llm[postgres]'`"

try:
    import psycopg
    from psycopg.abc import Buffer
    from psycopg.adapt import Loader
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import Format
    from psycopg.types.numeric import NumericBinaryLoader
    from psycopg.types.string import StrDumperUnknown
except ImportError as error:
    raise ConfigError(MISSING_PACKAGE) from error

FORM = (
    "--store: this is no URL of Postgres: postgresql://USER:PASSWORD@HOST:PORT/DATABASE, in which characters such as \
@ / : # % of a name or a password are written as %40 %2F %3A %23 %25"
)
LOCK = int.from_bytes(b"sluice")  # of pg_advisory_xact_lock, for this database
# What a connection is to notice when the network is cut; what a URL says goes before it.
NETWORK = {
    "connect_timeout": "5", "keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3",
    "tcp_user_timeout": "10000", "application_name": "sluice", "client_encoding": "utf8",
}  # fmt: skip
SILENT_S = 15.0  # a server that sends nothing for so long while it is waited for is given up
# A process that is stopped within a transaction must not keep the others waiting for long.
SETTINGS = f"""
SET search_path TO sluice;
SET lock_timeout = {int(1000 * BUSY_S)};
SET idle_in_transaction_session_timeout = {int(1000 * BUSY_S)};
"""
MORE_SETTINGS = {140_000: "SET idle_session_timeout = 0"}  # by the version of the server that knows them
BEGIN = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SELECT pg_advisory_xact_lock({LOCK})"
MORE_TABLES = """
ALTER TABLE answers ADD COLUMN rowid BIGINT GENERATED ALWAYS AS IDENTITY;
ALTER TABLE files ADD COLUMN rowid BIGINT GENERATED ALWAYS AS IDENTITY;
ALTER TABLE batches ADD COLUMN rowid BIGINT GENERATED ALWAYS AS IDENTITY;
CREATE TABLE log_parts (owner TEXT, log BIGINT, part BIGINT, PRIMARY KEY (owner, log, part));
CREATE TABLE log_frames (
    owner TEXT, log BIGINT, part BIGINT, at BIGINT, data BYTEA NOT NULL, PRIMARY KEY (owner, log, part, at)
);
ALTER TABLE log_frames ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE version (number BIGINT NOT NULL);
"""
FENCE = -1  # in the place of a part's number
TYPES = {"INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "BLOB": "BYTEA"}
USED = """
SELECT (SELECT coalesce(sum(bytes), 0) FROM answers) + (SELECT coalesce(sum(length(item)), 0) FROM items)
    + (SELECT coalesce(sum(length(data)), 0) FROM file_parts)
    + (SELECT coalesce(sum(length(body) + length(output)), 0) FROM batch_lines)
    + (SELECT coalesce(sum(length(data) + length(tokens)), 0) FROM pieces JOIN answers ON answer = id
        WHERE ended IS NULL)
"""
PASSING = ("starting up", "shutting down", "recovery mode", "not yet accepting", "too many", "connection slots")
NUL, ESCAPE = "\0", "\x01"


class _Unfit(psycopg.DatabaseError):
    """This server cannot be the store. The message says why."""


class Postgres:
    """A Database."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    refusals: tuple[type[Exception], ...] = (psycopg.DataError, psycopg.IntegrityError)

    def __init__(self, url: str) -> None:
        """Raises ConfigError, which does not show the URL: a part of its password may be where a host should be."""
        try:
            given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
        except psycopg.Error:
            raise ConfigError(FORM) from None
        user, host, port, name = (given.get(key, "") for key in ("user", "host", "port", "dbname"))
        if "@" in host + user or not re.fullmatch(r"[\d,]*", port) or re.search("[@/:]", name):
            raise ConfigError(FORM)
        self.opened = 0  # how often the store's connection was opened
        self._parameters = NETWORK | given
        self.name = f"postgresql://{user and user + '@'}{host}{port and ':' + port}/{name}"

    def start_problem(self) -> str:
        try:
            self.open().close()
        except psycopg.Error as exc:
            return _in_one_line(exc) if _is_final(exc) else ""
        return ""

    def open(self) -> "Session":
        wire = self.connect()
        try:
            _make_tables(wire)
        except BaseException:
            wire.close()
            raise
        self.opened += 1
        return Session(wire)

    def connect(self) -> "psycopg.Connection[Any]":
        # psycopg's overloads know each parameter by name
        wire = _Wire.connect(autocommit=True, **cast("dict[str, Any]", self._parameters))
        try:
            if (encoding := wire.info.parameter_status("server_encoding")) != "UTF8":
                raise _Unfit(f"the database has the encoding {encoding}, and must have UTF8")
            wire.execute(SETTINGS)
            for version, setting in MORE_SETTINGS.items():
                if wire.info.server_version >= version:
                    wire.execute(cast(Any, setting))
        except BaseException:
            wire.close()
            raise
        wire.adapters.register_dumper(str, _TextDumper)
        wire.adapters.register_loader("text", _TextLoader)
        wire.adapters.register_loader("numeric", _IntegerLoader)
        return wire

    def check(self, db: Connection) -> None:
        pass  # a database cannot be deleted while somebody is connected

    def begin(self, db: Connection) -> None:
        cast(Session, db).begin()

    def is_usable(self, db: Connection, error: Exception) -> bool:
        return not cast(Session, db).wire.closed

    def describe(self, error: Exception) -> str:
        return f"{self.name}: {_in_one_line(error)}"

    def sync(self, db: Connection) -> None:
        pass  # a transaction of the store is on the disk when it is committed, unless the database is set otherwise

    def used_bytes(self, db: Connection) -> int:
        """Returns the bytes of all texts, not those of tables on the disk: Postgres gives these back only later."""
        return int(db.execute(USED).fetchone()[0])

    def tidy(self, db: Connection) -> None:
        """Does nothing: Postgres has a process for it."""

    def logbook(self) -> "LogRows":
        return LogRows(self)


class _Wire(psycopg.Connection[Any]):
    """A connection that is closed when its server is silent.

    The kernel of a host whose Postgres is stopped goes on acknowledging what it gets, so the settings of NETWORK find
    nothing wrong.
    """

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **more: Any) -> T:
        return super().wait(self._bounded(gen), *args, **more)

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Passes on what psycopg waits for. It is told each tenth of a second, by a false `ready`, of silence."""
        heard = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    heard = now
                elif now - heard > SILENT_S:
                    self.close()
                    raise psycopg.OperationalError(f"the server has sent nothing for {SILENT_S:.0f} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            return cast(T, end.value)


class Session:
    """A Connection that takes statements as database.py describes them."""

    def __init__(self, wire: "psycopg.Connection[Any]") -> None:
        self.wire = wire

    def begin(self) -> None:
        self.wire.execute(BEGIN)

    def execute(self, sql: str, values: Values = (), /) -> Cursor:
        return cast(Cursor, self.wire.execute(cast(Any, translated(sql)), values, binary=True))

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor:
        cursor = self.wire.cursor()
        cursor.executemany(cast(Any, translated(sql)), rows)
        return cast(Cursor, cursor)

    def rollback(self) -> None:
        self.wire.rollback()

    def close(self) -> None:
        self.wire.close()


@lru_cache(maxsize=512)
def translated(sql: str) -> str:
    """Returns a statement in the words of Postgres, and with parameters as psycopg has them."""
    sql = sql.replace("%", "%%").replace("clock()", "extract(epoch FROM clock_timestamp())::double precision")
    return re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql).replace("?", "%s")


def _make_tables(wire: "psycopg.Connection[Any]") -> None:
    """Makes the tables if there are none. Processes that start together do so one after another."""
    wire.execute(BEGIN)
    if (found := wire.execute("SELECT to_regclass('sluice.version')::text").fetchone()) and found[0] is not None:
        row = wire.execute("SELECT number FROM version").fetchone()
        version = row[0] if row else 0
        if version != VERSION:
            raise _Unfit(f"the tables have version {version} of the store, this server has {VERSION}")
        _make_missing_indexes(wire)
    else:
        if wire.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'sluice'").fetchone() is None:
            wire.execute("CREATE SCHEMA sluice")
        schema = re.sub("|".join(TYPES), lambda word: TYPES[word[0]], SCHEMA)
        wire.execute(cast(Any, f"{schema}; {STORED_INDEX}; {MORE_TABLES}; INSERT INTO version VALUES ({VERSION})"))
    wire.execute("COMMIT")


def _make_missing_indexes(wire: "psycopg.Connection[Any]") -> None:
    """Gives tables of an earlier release the indexes that came later. They only save time, so the store is used without
    them where this user does not own the tables, or another program has them locked."""
    found = {name for (name,) in wire.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'sluice'")}
    for statement, name in re.findall(r"(CREATE INDEX IF NOT EXISTS (\w+)[^;]*)", f"{SCHEMA};{STORED_INDEX}"):
        if name in found:
            continue
        wire.execute("SAVEPOINT before_index")
        try:
            wire.execute(statement)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable):
            wire.execute("ROLLBACK TO before_index")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_final(error: psycopg.Error) -> bool:
    """Whether the server is there, and refuses this client: not only now."""
    if isinstance(error, _Unfit | psycopg.errors.InsufficientPrivilege):
        return True
    text = str(error)
    return ("FATAL" in text or "no password supplied" in text) and not any(words in text for words in PASSING)


# Values. Postgres has no character NUL in a text; sums of integers have the type numeric.


def escaped(text: str) -> str:
    """Returns a text without NUL; no two texts become the same."""
    if NUL in text or ESCAPE in text:
        return text.replace(ESCAPE, ESCAPE + "1").replace(NUL, ESCAPE + "0")
    return text


def unescaped(text: str) -> str:
    return text.replace(ESCAPE + "0", NUL).replace(ESCAPE + "1", ESCAPE) if ESCAPE in text else text


class _TextDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Buffer | None:
        return super().dump(escaped(obj))


class _TextLoader(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> str:
        return unescaped(bytes(data).decode())


class _IntegerLoader(NumericBinaryLoader):
    def load(self, data: Buffer) -> Any:
        return int(super().load(data))


# the logs of running streams


class RowWriter:
    """A LogWriter, with a connection of its own.

    What is written is not synced to the disk: it survives the end of its process, but not a crash of the database. So
    nothing more is written to a log after its connection was lost: it is not known what it still has. The store's
    connection, which is used each second, is lost with it.
    """

    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, database: Postgres, owner: str, log: int) -> None:
        self.name = database.name
        self._database, self._owner, self._log = database, owner, log
        self._wire: psycopg.Connection[Any] | None = None
        self._opened = 0  # how often the store's connection had been opened when this one was
        self._part, self._at = FENCE, 0

    def make(self) -> None:
        wire = self._database.connect()
        try:
            wire.execute("SET synchronous_commit = off")
            self._add_part(wire, FENCE)
        except BaseException:
            wire.close()
            raise
        self._wire, self._opened = wire, self._database.opened

    def is_lost(self) -> bool:
        return self._wire is not None and (self._wire.closed or self._opened != self._database.opened)

    def write(self, part: int, frame: bytes) -> bool:
        wire = self._wire
        if wire is None or self.is_lost():
            raise LogGone(f"{self.name}: the connection was lost")
        try:
            if part != self._part:
                self._add_part(wire, part)
                self._part, self._at = part, 0
            written = wire.execute(
                "INSERT INTO log_frames SELECT owner, log, %s, %s, %s FROM log_parts "
                "WHERE owner = %s AND log = %s AND part = %s FOR KEY SHARE",
                (part, self._at, frame, self._owner, self._log, FENCE),
            )
        except psycopg.Error as exc:
            if wire.closed:
                raise LogGone(self.describe(exc)) from exc
            raise
        self._at += len(frame)
        return written.rowcount == 1

    def _add_part(self, wire: "psycopg.Connection[Any]", part: int) -> None:
        wire.execute("INSERT INTO log_parts VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (self._owner, self._log, part))

    def describe(self, error: Exception) -> str:
        return self._database.describe(error)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()


class LogRows:
    """A Logbook."""

    def __init__(self, database: Postgres) -> None:
        self._database = database

    def owner(self, process: str) -> str:
        return process

    def survived(self, owner: str) -> bool:
        return True  # the writers are other machines' processes: they notice when the database was away

    def writer(self, owner: str, log: int) -> RowWriter:
        return RowWriter(self._database, owner, log)

    def parts(self, db: Connection) -> list[LogPart]:
        found = db.execute("SELECT owner, log, part FROM log_parts")
        return [LogPart(owner, log, None if part == FENCE else part) for owner, log, part in found]

    def read(self, db: Connection, part: LogPart, start: int) -> bytes:
        found = db.execute(
            "SELECT data FROM log_frames WHERE owner = ? AND log = ? AND part = ? AND at >= ? ORDER BY at",
            (*_key(part), start),
        )
        return b"".join([data for (data,) in found])

    def remove_fence(self, db: Connection, fence: LogPart) -> None:
        db.execute("DELETE FROM log_parts WHERE owner = ? AND log = ? AND part = ?", _key(fence))

    def delete(self, db: Connection, parts: Iterable[LogPart]) -> None:
        keys = [_key(part) for part in parts]
        for table in ("log_frames", "log_parts"):
            db.executemany(f"DELETE FROM {table} WHERE owner = ? AND log = ? AND part = ?", keys)


def _key(part: LogPart) -> tuple[str, int, int]:
    return part.owner, part.log, FENCE if part.part is None else part.part
