"""Batches as rows: their lines, who works on each, and what came of it.

A line is `waiting` until it has an outcome, which is written once: a write says which process has taken the line, and
has no effect if another one has taken it meanwhile, or if it has an outcome. A process takes lines a few at a time;
those of a process that is gone (store.py) can be taken by all others. So every line has exactly one outcome, whichever
processes are killed, and several frontends share a batch.

Each function is the `work` of a Store (see answers.py).
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frontend.kept import files
from frontend.kept.answers import ALIVE
from frontend.kept.database import Connection
from frontend.kept.files import KeptFile

# Statuses of a batch, in OpenAI's words.
VALIDATING, RUNNING, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
# States of a line. A line that succeeded or failed was answered; the answer of a failed one is an error.
WAITING, SUCCEEDED, ERRORED, DROPPED, LATE = "waiting", "succeeded", "errored", "cancelled", "expired"
ENDED = f"{SUCCEEDED} {ERRORED} {DROPPED} {LATE}"
FAILED_LINES = f"{ERRORED} {DROPPED} {LATE}"  # those of an error file
CLOSE_AT_ONCE = 256  # how many lines without an answer get their outcome in one transaction
_COLUMNS = (
    "id, tenant, format, status, created, expires, ended, endpoint, input_file, metadata, times, errors, total, "
    "input_bytes, keep_output_s, output_file, error_file, owner"
)  # fmt: skip


@dataclass(slots=True)
class Batch:
    """A row. Times are in seconds since 1970.

    format: the name of the API in whose form lines and outcomes are (see frontend/routes/batches.py)
    endpoint: the route that each line is for
    times: when it got each of its statuses
    errors: what was wrong with its lines, if it failed
    keep_output_s: how long its output files are kept after they were made; None: by --store-max-age
    """

    id: str
    tenant: str
    format: str
    status: str
    created: int
    expires: float
    ended: float | None
    endpoint: str
    input_file: str
    metadata: Any
    times: dict[str, int]
    errors: list[dict[str, Any]]
    total: int = 0
    input_bytes: int = 0
    keep_output_s: float | None = None
    output_file: str = ""
    error_file: str = ""
    owner: str = ""
    counts: dict[str, int] = field(default_factory=dict)  # lines by state; not a column


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a process has taken. failures: how often the server failed on it before

    body: empty if it is damaged in the store
    """

    batch: str
    number: int
    custom_id: str
    body: bytes
    failures: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What waits, over all batches: of /stats and /metrics."""

    batches: int = 0
    lines_waiting: int = 0
    lines_running: int = 0


def insert(db: Connection, one: Batch) -> None:
    db.execute(
        f"INSERT INTO batches ({_COLUMNS}) VALUES ({', '.join('?' * 18)})",
        (
            one.id, one.tenant, one.format, one.status, one.created, one.expires, one.ended, one.endpoint,
            one.input_file, msgspec.json.encode(one.metadata), msgspec.json.encode(one.times),
            msgspec.json.encode(one.errors), one.total, one.input_bytes, one.keep_output_s, one.output_file,
            one.error_file, one.owner,
        ),
    )  # fmt: skip


def find(db: Connection, id: str, tenant: str, format: str) -> Batch | None:
    return _row(db, "id = ? AND tenant = ? AND format = ?", id, tenant, format)


def any_of(db: Connection, id: str) -> Batch | None:
    """Returns a batch of any tenant, for the processes that work on it."""
    return _row(db, "id = ?", id)


def listed(
    db: Connection, tenant: str, format: str, most: int, *, after: str | None = None, before: str | None = None
) -> list[str] | None:
    """Returns the ids of a tenant's batches, newest first, `most` at most. A tenant may have a million.

    after, before: the id of the batch behind which, or else in front of which they are. None: there is no such batch
    """
    anchor, newest_first = before if after is None else after, before is None or after is not None
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    where: str = ""
    place: tuple[int, ...] = ()
    if anchor is not None:
        found = db.execute(
            "SELECT created, rowid FROM batches WHERE id = ? AND tenant = ? AND format = ?", (anchor, tenant, format)
        ).fetchone()
        if found is None:
            return None
        where = f"AND (created {sign} ? OR (created = ? AND rowid {sign} ?)) "
        place = (found[0], *found)
    rows = db.execute(
        f"SELECT id FROM batches WHERE tenant = ? AND format = ? {where}"
        f"ORDER BY created {order}, rowid {order} LIMIT ?",
        (tenant, format, *place, most),
    )
    ids = [id for (id,) in rows]
    return ids if newest_first else ids[::-1]


def open_batches(db: Connection) -> list[Batch]:
    """Returns the batches that have not ended, oldest first, without the counts of their lines."""
    return [_made(row) for row in db.execute(f"SELECT {_COLUMNS} FROM batches WHERE ended IS NULL ORDER BY created")]


def count_open(db: Connection, tenant: str) -> int:
    """Returns how many batches of a tenant have not ended."""
    found = db.execute("SELECT count(*) FROM batches WHERE tenant = ? AND ended IS NULL", (tenant,)).fetchone()
    return int(found[0])


def _row(db: Connection, which: str, *values: str) -> Batch | None:
    found = db.execute(f"SELECT {_COLUMNS} FROM batches WHERE {which}", values).fetchone()
    if found is None:
        return None
    one = _made(found)
    one.counts = dict(db.execute("SELECT state, count(*) FROM batch_lines WHERE batch = ? GROUP BY state", (one.id,)))
    return one


def _made(row: Sequence[Any]) -> Batch:
    one = Batch(*row)
    one.metadata, one.times, one.errors = map(msgspec.json.decode, (row[9], row[10], row[11]))
    return one


# validation


def claim(db: Connection, id: str, owner: str) -> bool:
    """Makes a process the one that reads the lines of a batch, if no living process does. Forgets what others read."""
    changed = db.execute(
        f"UPDATE batches SET owner = ? WHERE id = ? AND status = ? AND owner != ? AND owner NOT IN {ALIVE}",
        (owner, id, VALIDATING, owner),
    )
    if changed.rowcount:
        db.execute("DELETE FROM batch_lines WHERE batch = ?", (id,))
    return bool(changed.rowcount)


def add_lines(db: Connection, id: str, owner: str, lines: Sequence[tuple[int, str, bytes]]) -> bool:
    """Adds lines: number, custom id and compressed body. Returns False if another process reads the batch now."""
    reads = db.execute("SELECT 1 FROM batches WHERE id = ? AND owner = ? AND status = ?", (id, owner, VALIDATING))
    if not reads.fetchone():
        return False
    db.executemany(
        "INSERT INTO batch_lines VALUES (?, ?, ?, ?, 'waiting', '', 0, ?, ?)",
        [(id, number, custom_id, body, b"", len(body) + len(custom_id.encode())) for number, custom_id, body in lines],
    )
    return True


def validated(db: Connection, id: str, owner: str, errors: Sequence[Mapping[str, Any]], total: int, size: int) -> None:
    """Ends the reading of a batch: it runs, or it has failed if there are errors. size: bytes of its input"""
    status = FAILED if errors else RUNNING
    changed = db.execute(
        "UPDATE batches SET errors = ?, total = ?, input_bytes = ?, owner = '' WHERE id = ? AND owner = ?",
        (msgspec.json.encode(errors), total, size, id, owner),
    )
    if not changed.rowcount:
        return
    if errors:
        db.execute("DELETE FROM batch_lines WHERE batch = ?", (id,))
    if db.execute("SELECT status FROM batches WHERE id = ?", (id,)).fetchone()[0] == VALIDATING:
        _set(db, id, status)


def release(db: Connection, id: str, owner: str) -> None:
    """Leaves the reading of a batch to another process."""
    db.execute("UPDATE batches SET owner = '' WHERE id = ? AND owner = ?", (id, owner))


# lines


def take(db: Connection, id: str, owner: str, most: int) -> list[Line]:
    """Takes the next lines of a running batch that no living process works on."""
    if not db.execute("SELECT 1 FROM batches WHERE id = ? AND status = ?", (id, RUNNING)).fetchone():
        return []
    found = db.execute(
        "SELECT batch, number, custom_id, body, failures FROM batch_lines WHERE batch = ? AND state = 'waiting' "
        f"AND owner != ? AND owner NOT IN {ALIVE} ORDER BY number LIMIT ?",
        (id, owner, most),
    ).fetchall()
    db.executemany(
        "UPDATE batch_lines SET owner = ? WHERE batch = ? AND number = ?", [(owner, id, row[1]) for row in found]
    )
    return [Line(batch, number, custom, _body(body), failures) for batch, number, custom, body, failures in found]


def _body(data: bytes) -> bytes:
    try:
        return zlib.decompress(data)
    except zlib.error:
        return b""


def give_back(db: Connection, line: Line, owner: str, *, failed: bool) -> None:
    """Lets another process have a line. failed: whether the server failed on it"""
    db.execute(
        "UPDATE batch_lines SET owner = '', failures = failures + ? WHERE batch = ? AND number = ? "
        "AND state = 'waiting' AND owner = ?",
        (int(failed), line.batch, line.number, owner),
    )


def end_line(db: Connection, line: Line, owner: str, state: str, packed: bytes, size: int) -> bool:
    """Writes the outcome of a line. Returns False, and writes nothing, if another process has the line.

    packed: the line of the output file, compressed by zlib; size: its bytes before
    """
    changed = db.execute(
        "UPDATE batch_lines SET state = ?, output = ?, bytes = ?, owner = '', body = ? WHERE batch = ? "
        "AND number = ? AND state = 'waiting' AND owner = ?",
        (state, packed, size, b"", line.batch, line.number, owner),
    )
    return bool(changed.rowcount)


def waiting(db: Connection, id: str) -> tuple[int, int]:
    """Returns how many lines of a batch wait, and how many of them a living process works on."""
    found = db.execute(
        f"SELECT count(*), count(*) FILTER (WHERE owner IN {ALIVE}) FROM batch_lines "
        "WHERE batch = ? AND state = 'waiting'",
        (id,),
    ).fetchone()  # fmt: skip
    return found[0], found[1]


def unanswered(db: Connection, id: str) -> list[tuple[int, str]]:
    """Returns number and custom id of the next waiting lines."""
    return db.execute(
        "SELECT number, custom_id FROM batch_lines WHERE batch = ? AND state = 'waiting' ORDER BY number LIMIT ?",
        (id, CLOSE_AT_ONCE),
    ).fetchall()


def close_lines(db: Connection, id: str, state: str, ended: Sequence[tuple[int, bytes, int]]) -> None:
    """Gives waiting lines the outcome that they were not answered: number, compressed output, and its bytes before."""
    db.executemany(
        "UPDATE batch_lines SET state = ?, output = ?, bytes = ?, owner = '', body = ? "
        "WHERE batch = ? AND number = ? AND state = 'waiting'",
        [(state, packed, size, b"", id, number) for number, packed, size in ended],
    )


# the life of a batch


def _set(db: Connection, id: str, status: str) -> None:
    now = time.time()
    times = msgspec.json.decode(db.execute("SELECT times FROM batches WHERE id = ?", (id,)).fetchone()[0])
    ended = now if status in (COMPLETED, FAILED, CANCELLED, EXPIRED) else None
    db.execute(
        "UPDATE batches SET status = ?, times = ?, ended = ? WHERE id = ?",
        (status, msgspec.json.encode(times | {status: int(now)}), ended, id),
    )


def cancel(db: Connection, id: str) -> None:
    """Asks for the end of a batch that has not ended. Lines that are answered stay answered."""
    found = db.execute("SELECT status FROM batches WHERE id = ?", (id,)).fetchone()
    if found and found[0] in (VALIDATING, RUNNING):
        _set(db, id, CANCELLING)


def delete(db: Connection, id: str) -> None:
    """Deletes a batch with its lines and its output files."""
    for table, column in (("batch_lines", "batch"), ("files", "batch"), ("batches", "id")):
        db.execute(f"DELETE FROM {table} WHERE {column} = ?", (id,))


def begin_end(db: Connection, id: str, before: str) -> bool:
    """Begins the end of a batch: no line is taken any more. Returns False if its status is not `before`."""
    found = db.execute("SELECT status FROM batches WHERE id = ?", (id,)).fetchone()
    if found is None or found[0] != before:
        return False
    _set(db, id, FINALIZING)
    return True


def finish(db: Connection, id: str) -> None:
    """Ends a batch whose lines all have an outcome: makes its output files, and gives it its last status."""
    one = any_of(db, id)
    if one is None or one.status != FINALIZING or one.counts.get(WAITING):
        return
    now, made = time.time(), {}
    for name, states in (("output", SUCCEEDED), ("error", FAILED_LINES)):
        wanted = states.split()
        count, size = db.execute(
            f"SELECT count(*), coalesce(sum(bytes), 0) FROM batch_lines WHERE batch = ? "
            f"AND state IN ({', '.join('?' * len(wanted))})",
            (id, *wanted),
        ).fetchone()
        made[name] = f"file-{id.removeprefix('batch_')}-{name}" if count and one.input_file else ""
        if made[name]:
            expires = None if one.keep_output_s is None else now + one.keep_output_s
            filename = f"{id}_{name}.jsonl"
            made_file = KeptFile(
                made[name], one.tenant, int(now), expires, filename, "batch_output", size, True, id, states
            )
            files.insert(db, made_file)
    db.execute("UPDATE batches SET output_file = ?, error_file = ? WHERE id = ?", (made["output"], made["error"], id))
    late = one.counts.get(LATE)
    _set(db, id, EXPIRED if late else CANCELLED if CANCELLING in one.times else COMPLETED)


def counts(db: Connection) -> Counts:
    found = db.execute(
        f"SELECT count(DISTINCT id), count(number), count(*) FILTER (WHERE batch_lines.owner IN {ALIVE}) FROM batches "
        "LEFT JOIN batch_lines ON batch = id AND state = 'waiting' WHERE ended IS NULL"
    ).fetchone()
    return Counts(found[0], found[1] - found[2], found[2])
