"""The store: a database, and the thread that alone reads and writes it.

The event loop never waits for the disk or the network. A caller hands in a function that takes the connection; the
functions that have come meanwhile are run together, in one transaction. So a write costs the loop some microseconds,
and many streams share one commit. Several processes may use the same database: a file of SQLite those of a machine, a
Postgres those of many.

Tenants share the thread by time: next is the function of the tenant that has used it least. After SLICE_S, a
transaction ends, so that others, other processes and the sign that this process lives never wait for long.

Knows no answer: the tables are in database.py, and answers.py, conversations.py, files.py and batches.py read and
write them.
"""

import asyncio
import logging
import math
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, TypeVar

from frontend.kept.database import BUSY_S, Connection, Damaged, Database, StoreError, transaction
from frontend.kept.sqlite import SQLite
from frontend.turns import tenant
from shared.config.declaration import ConfigError

T = TypeVar("T")
Work = Callable[[Connection], T]

log = logging.getLogger("sluice.frontend")
AT_ONCE = 1024  # how many functions share a transaction at most
SLICE_S = 0.1  # after this long, what has not begun waits for the next transaction
BEAT_S = 1.0  # interval at which a process shows that it lives
DEAD_S = 6.0  # a process that has not shown itself for this long has lost its answers to the others
SWEEP_S = 60.0  # interval between two deletions of what is too old or too much
SWEEP_ROWS = 64  # how many answers are deleted at a time, before the size is looked at again
RETRY_S = 5.0  # pause before a file that could not be opened is tried again
UPLOAD_S = 3600.0  # an upload that has not ended after this long is deleted


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    done: "Callable[[Any, StoreError | None], None]"
    tenant: str
    number: int = 0  # its place in the order in which all jobs came
    value: Any = None
    error: StoreError | None = None


class _Waiting:
    """Jobs that wait, in turns: next is the first job of the tenant that has used the thread for the shortest time."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[_Job]] = {}
        self._turns: list[tuple[float, int, str]] = []  # a heap: time used, number of the first job, tenant
        self._used = 0.0  # by the tenant whose job was taken last; who comes anew has used as much

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: _Job) -> None:
        if job.tenant in self._jobs:
            self._jobs[job.tenant].append(job)
        else:
            self._jobs[job.tenant] = deque([job])
            heappush(self._turns, (self._used, job.number, job.tenant))

    def take(self, after: "_Waiting | None" = None) -> _Job | None:
        """Returns the next job; None: there is none. after: a job waits for those of its tenant that came before it"""
        passed = []
        found = None
        while self._turns and found is None:
            used, number, tenant = turn = heappop(self._turns)
            if after is not None and after._first(tenant) < number:
                passed.append(turn)
            else:
                self._used, found = used, self._jobs[tenant].popleft()
        for turn in passed:
            heappush(self._turns, turn)
        return found

    def took(self, job: _Job, seconds: float) -> None:
        """Counts the time of the job that was taken last."""
        if jobs := self._jobs[job.tenant]:
            heappush(self._turns, (self._used + seconds, jobs[0].number, job.tenant))
        else:
            del self._jobs[job.tenant]

    def clear(self) -> list[_Job]:
        """Returns all jobs, which wait no more."""
        jobs = [job for waiting in self._jobs.values() for job in waiting]
        self._jobs.clear()
        self._turns.clear()
        return jobs

    def _first(self, tenant: str) -> float:
        jobs = self._jobs.get(tenant)
        return jobs[0].number if jobs else math.inf


class Store:
    """The store of one process. `problem` says why it cannot be used; empty while it can."""

    def __init__(self, database: Database, owner: str, *, max_age_s: float, max_bytes: int) -> None:
        """
        owner: the id of this process, which no other process ever has
        max_age_s: ended answers that are older are deleted; 0: no limit
        max_bytes: the oldest ended answers are deleted while it has more bytes in use; 0: no limit
        """
        self.database, self.owner, self.problem = database, owner, ""
        self._max_age_s, self._max_bytes = max_age_s, max_bytes
        self._coming: queue.SimpleQueue[tuple[_Job, bool] | None] = queue.SimpleQueue()  # None: it is the end
        self._count = 0  # of jobs that have come
        self._writes, self._reads = _Waiting(), _Waiting()
        self._asked = self._synced = 0  # how many syncs were asked for, and how many of them are done
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._db: Connection | None = None
        self._opened_at = self._beaten_at = self._swept_at = -1e9
        self._unusable: tuple[type[Exception], ...] = (*database.errors, OSError, _Unopened)
        self._committing = False  # whether the transaction that runs has all its statements

    def start(self) -> None:
        """Starts the thread. The calling loop gets all results."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread after everything that was handed in before."""
        if self._thread.is_alive():
            self._coming.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, BUSY_S)

    async def read(self, work: Work[T]) -> T:
        """Returns what `work` returns. Raises StoreError."""
        return await self._awaited(work, writes=False)

    async def write(self, work: Work[T]) -> T:
        """Runs `work` in a transaction, and returns its result when it is committed. Raises StoreError."""
        return await self._awaited(work, writes=True)

    async def sync(self) -> None:
        """Makes what was committed survive a power cut. What asks at the same time shares a sync. Raises StoreError."""
        self._asked += 1
        await self.read(partial(self._sync, self._asked))

    def _sync(self, number: int, db: Connection) -> None:
        if number > self._synced:
            asked = self._asked
            self.database.sync(db)
            self._synced = asked

    def post(self, work: Work[T], done: Callable[[T, StoreError | None], None]) -> None:
        """Runs `work` in a transaction; then calls `done` in the loop with the result, or with an error."""
        self._coming.put((_Job(work, done, tenant.get()), True))

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

        self._coming.put((_Job(work, done, tenant.get()), writes))
        return await result

    # the thread

    def _run(self) -> None:
        stopped = False
        while not stopped or self._writes or self._reads:
            stopped = self._receive() or stopped
            self._do(self._writes, self._write)
            self._do(self._reads, self._read)
        if self._db is not None:
            with suppress(*self.database.errors):
                self._db.execute("DELETE FROM owners WHERE id = ?", (self.owner,))
            self._close()

    def _receive(self) -> bool:
        """Takes what has come, and waits for it if nothing else is to be done. Returns whether it is the end."""
        with suppress(queue.Empty):
            coming = self._coming.get(timeout=0 if self._writes or self._reads else BEAT_S)
            while coming is not None:
                job, writes = coming
                self._count += 1
                job.number = self._count
                (self._writes if writes else self._reads).add(job)
                coming = self._coming.get_nowait()
            return True
        return False

    def _do(self, waiting: _Waiting, act: Callable[[Connection, list[_Job]], None]) -> None:
        """Does some of what waits. Reads go on if writes fail. act: does it, and notes what it has begun"""
        begun: list[_Job] = []
        self._committing = False
        try:
            act(self._opened(), begun)
        except self._unusable as exc:
            self._failed(exc)
            begun += waiting.clear()
            for job in begun:
                job.error = StoreError(self.problem, uncertain=self._committing)
        if begun:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_deliver, begun)

    def _opened(self) -> Connection:
        """Returns the connection. While there is a problem, opens another one every RETRY_S."""
        now = time.monotonic()
        due = now - self._opened_at >= RETRY_S
        if self._db is not None and not (self.problem and due):
            return self._db
        if not due:
            raise _Unopened(self.problem)
        self._close()
        try:
            self._db = self.database.open()
        finally:  # an attempt may take seconds, and there is to be time between two of them
            self._opened_at = time.monotonic()
        return self._db

    def _close(self) -> None:
        if self._db is not None:
            with suppress(*self.database.errors):
                self._db.close()
        self._db = None

    def _failed(self, exc: Exception) -> None:
        """Notes why the store cannot be used, and logs it once. What cannot even be read is closed, and tried later."""
        problem = str(exc) if isinstance(exc, _Unopened) else self.database.describe(exc)
        if problem != self.problem:
            log.error("answers are not kept, but given: %s", problem)
        self.problem = problem
        if self._db is None:
            return
        if not self.database.is_usable(self._db, exc):
            self._close()
            return
        with suppress(*self.database.errors):
            self._db.rollback()

    def _write(self, db: Connection, begun: list[_Job]) -> None:
        beaten = self._upkeep(db)
        if self._writes:
            self._transact(db, begun)
        if self.problem and (beaten or begun):
            self.problem = ""
            log.info("the store of answers %s can be used again", self.database.name)

    def _transact(self, db: Connection, begun: list[_Job]) -> None:
        """Runs what waits in one transaction. One that fails does not undo the others."""
        self.database.begin(db)
        end = time.monotonic() + SLICE_S
        while len(begun) < AT_ONCE and time.monotonic() < end and (job := self._writes.take()) is not None:
            begun.append(job)
            db.execute("SAVEPOINT job")
            self._attempt(db, job, self._writes)
            if job.error is not None:
                db.execute("ROLLBACK TO job")
            db.execute("RELEASE job")
        self._committing = True
        db.execute("COMMIT")

    def _upkeep(self, db: Connection) -> bool:
        """Shows that this process lives, and deletes what is too old. Returns whether something was written."""
        now = time.monotonic()
        beats = now - self._beaten_at >= BEAT_S
        if beats:
            self.database.check(db)
            db.execute(
                "INSERT INTO owners VALUES (?, clock()) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
                (self.owner,),
            )  # fmt: skip
            # Where a clock was set back, a process that is gone would live until it is as late again.
            db.execute("UPDATE owners SET seen = clock() WHERE seen > clock()")
            self._beaten_at = now
        if now - self._swept_at >= SWEEP_S:
            done = sweep(self.database, db, self._max_age_s, self._max_bytes, time.monotonic() + SLICE_S)
            self._swept_at = now if done else self._swept_at
        return beats

    def _read(self, db: Connection, begun: list[_Job]) -> None:
        """Reads after all writes of the same tenant that were handed in before."""
        end = time.monotonic() + SLICE_S
        while time.monotonic() < end and (job := self._reads.take(after=self._writes)) is not None:
            begun.append(job)
            self._attempt(db, job, self._reads)

    def _attempt(self, db: Connection, job: _Job, waiting: _Waiting) -> None:
        """Runs the work of a job. An error of the database itself is raised, because it concerns all jobs."""
        began = time.monotonic()
        try:
            job.value = job.work(db)
        except StoreError as exc:
            job.error = exc
        except Exception as exc:
            if isinstance(exc, self.database.errors) and not isinstance(exc, self.database.refusals):
                raise
            log.exception("a read or write of the store failed")
            job.error = StoreError(f"{type(exc).__name__}: {exc}")
        finally:
            waiting.took(job, time.monotonic() - began)


class _Unopened(Exception):
    """There is no connection, and it is too early for the next attempt."""


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        job.done(job.value, job.error)


def database_of(store: str) -> Database:
    """Returns the database that --store names: a URL of Postgres, or a file. Raises ConfigError."""
    if store.startswith(("postgresql:", "postgres:")):
        from frontend.kept.postgres import Postgres  # its package is optional

        return Postgres(store)
    return SQLite(Path(store))


def check_store(store: str) -> None:
    """Raises ConfigError if a server is to be started with a store that is none: a folder, a device, or no true URL.

    A folder that lies there later is as any other store that cannot be used: the server goes on without it. So is a
    Postgres that is away; one that refuses this server is found here.
    """
    database = database_of(store)
    if problem := database.start_problem():
        raise ConfigError(f"--store {database.name}: {problem}")


def packed(text: bytes) -> bytes:
    """Returns a text as the store has it: compressed, with a checksum. An empty one stays empty."""
    return zlib.compress(text, 1) if text else b""


def unpacked(data: bytes) -> bytes:
    """Returns a text of the store. Raises Damaged if its bytes have changed there."""
    if data[:1] in (b"", b"{", b"["):  # JSON, as stores of version 1 have it
        return data
    try:
        return zlib.decompress(data)
    except zlib.error:
        raise Damaged from None


def sweep(database: Database, db: Connection, max_age_s: float, max_bytes: int, until: float = math.inf) -> bool:
    """Deletes ended answers, conversations, files and batches that are too old, then the oldest answers while there is
    too much.

    Returns whether it is done: not if there is more to delete at `until`, of a monotonic clock.
    """
    now = time.time()
    if max_age_s:
        while _delete(database, db, "ended < ?", now - max_age_s)[0]:
            if time.monotonic() >= until:
                return False
    with transaction(database, db):
        if max_age_s:
            old = db.execute("SELECT id FROM conversations WHERE used < ?", (now - max_age_s,)).fetchall()
            db.executemany("DELETE FROM items WHERE conversation = ?", old)
            db.executemany("DELETE FROM conversations WHERE id = ?", old)
        _sweep_batches(db, now, max_age_s)
        db.execute("DELETE FROM owners WHERE seen < clock() - 3600")
    done = not max_bytes or _make_room(database, db, max_bytes, until)
    database.tidy(db)
    return done


def _make_room(database: Database, db: Connection, max_bytes: int, until: float) -> bool:
    """Deletes ended answers while there are too many bytes: always the oldest of the tenant whose answers have most.

    So who has much makes room, and nobody can push the answers of others out.
    """
    of_tenants: dict[str, int] | None = None
    while database.used_bytes(db) > max_bytes:
        if of_tenants is None:
            which = "SELECT tenant, sum(bytes) FROM answers WHERE ended IS NOT NULL GROUP BY tenant"
            of_tenants = dict(db.execute(which).fetchall())
        if not of_tenants:
            return True
        if time.monotonic() >= until:
            return False
        most = max(of_tenants, key=of_tenants.__getitem__)
        count, freed = _delete(database, db, "tenant = ? AND ended IS NOT NULL", most)
        of_tenants[most] -= freed
        if not count:
            del of_tenants[most]
    return True


def _sweep_batches(db: Connection, now: float, max_age_s: float) -> None:
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


def _delete(database: Database, db: Connection, which: str, *values: float | str) -> tuple[int, int]:
    with transaction(database, db):
        return delete_ended(db, which, *values)


def delete_ended(db: Connection, which: str, *values: float | str) -> tuple[int, int]:
    """Deletes the oldest of these answers, SWEEP_ROWS at most. Returns how many, and their bytes."""
    found = db.execute(
        f"SELECT id, bytes FROM answers WHERE {which} ORDER BY ended LIMIT {SWEEP_ROWS}", values
    ).fetchall()
    ids = [(id,) for id, _ in found]
    db.executemany("DELETE FROM pieces WHERE answer = ?", ids)
    db.executemany("DELETE FROM answers WHERE id = ?", ids)
    return len(found), sum(size for _, size in found)
