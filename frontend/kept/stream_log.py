"""The logs of running streams, to which bytes are added before a client gets them.

Each process has one log, which one thread writes. All records that the event loop makes in a turn are one frame and one
write, so many streams share the cost, and no lock of another process is waited for. An answer that ends is moved to the
store as a whole, from memory. So a full part of the log is deleted, unread, when all answers that it has records of
have ended. If some run on until there are too many parts, they are read back and moved to the store.

Each log has a *fence*. While it exists, its process may show what it has written. Another process that takes answers
over removes the fence first, and then reads the log. A process learns with each write whether its fence is there, so a
reader never gets a byte that the new owner does not know, however long the old one was stopped between two
instructions. There is no clock in that.

Frames are not synced to the disk. When the machine itself stops, by a power cut, the end of a log may be missing: it is
not known then what was shown (`Logbook.survived`).

A Logbook (database.py) decides where logs are stored: in the folder of an SQLite file, or in a Postgres. Functions that
take a connection run in the store's thread (see answers.py).
"""

import asyncio
import logging
import queue
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from frontend.kept import answers
from frontend.kept.answers import KeptAnswer, Record
from frontend.kept.database import Connection, Damaged, Logbook, LogGone, LogPart, LogWriter, StoreError
from frontend.kept.store import RETRY_S

log = logging.getLogger("sluice.frontend")
MAGIC = b"SLF1"
HEAD = struct.Struct("<4sII")  # magic, length and checksum of a frame
SUM = struct.Struct("<I")  # of the head itself, which follows it
FRAME = HEAD.size + SUM.size
PART_BYTES = 8 << 20  # a part that is larger gets no more frames
MOST_PARTS = 4  # how many full parts may wait for their answers to end
TIDY_S = 60.0  # interval between two looks for logs of processes that are gone
UNUSED_S = 10.0  # what was read of a log is forgotten when nobody has asked for it for so long
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Record])


class LogUser(Protocol):
    """What waits for its record: a Run."""

    def committed(self, record: Record, owned: bool, error: StoreError | None) -> None:
        """Called in the loop when a record is written.

        owned: whether its bytes may be shown; False: another process has taken over
        """


_Batch = tuple[list[Record], list[LogUser]]  # records, and who waits for each


class StreamLog:
    """One log of this process. `ended`: nothing more can be written to it, and the process needs another one."""

    def __init__(self, writer: LogWriter, problem: Callable[[], str]) -> None:
        """problem: returns why the store cannot be used now; nothing is kept then"""
        self.ended = False
        self.part = 0  # the number of the part that is written now
        self.contents: dict[int, set[str]] = {}  # the answers that each part has records of
        self._writer, self._store_problem = writer, problem
        self._made = False  # whether the fence is
        self._length = 0  # of the part
        self._error, self._failed_at = "", -RETRY_S
        self._pending: _Batch = ([], [])
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
        self._loop = asyncio.get_running_loop()

    def is_over(self) -> bool:
        """Whether nothing more can be written."""
        self.ended = self.ended or self._writer.is_lost()
        return self.ended

    def problem(self) -> StoreError | None:
        """Returns why what was written is lost, with the store that it belonged to; None: it is not."""
        return StoreError(f"{self._writer.name} is lost with its store") if self._writer.is_lost() else None

    def prepare(self) -> None:
        """Makes the fence, before an answer is written to the store that is to be logged here. In the store's thread.

        Raises StoreError, also for RETRY_S after a write that failed.
        """
        if self._error and time.monotonic() - self._failed_at < RETRY_S:
            raise StoreError(self._error)
        if not self._made and not self.ended:
            try:
                self._writer.make()
            except self._writer.errors as exc:
                raise StoreError(self._writer.describe(exc)) from exc
            self._made = True
            self._thread.start()

    def add(self, record: Record, user: LogUser) -> None:
        """Writes a record together with all others of this turn of the loop, and then calls the user."""
        records, users = self._pending
        if not records:
            self._loop.call_soon(self._hand_over)
        records.append(record)
        users.append(user)

    def _hand_over(self) -> None:
        self._queue.put(self._pending)
        self._pending = ([], [])

    async def close(self) -> None:
        """Ends the thread after everything that was added before. What was written stays."""
        if self._pending[0]:
            self._hand_over()
        self._queue.put(None)
        if self._thread.is_alive():
            await self._loop.run_in_executor(None, self._thread.join)
        self.ended = True
        self._writer.close()

    # the thread

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Writes what the loop has handed over. Returns False at the end."""
        records, users = self._next()
        if not records:
            return False
        owned, error = True, None
        try:
            if problem := self._store_problem():
                raise StoreError(problem)
            owned = self._write(records)
        except StoreError as exc:
            error = exc
        except LogGone as exc:
            self.ended = True
            error = self._failed(str(exc))
        except self._writer.errors as exc:
            self._next_part()
            error = self._failed(self._writer.describe(exc))
        self.ended = self.ended or not owned
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_deliver, records, users, owned, error)
        return True

    def _next(self) -> _Batch:
        """Returns what has come meanwhile, of several turns if the last write took so long. Empty: it is the end."""
        records, users = list[Record](), list[LogUser]()
        waiting = self._queue.get()
        while waiting is not None:
            records += waiting[0]
            users += waiting[1]
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                break
            if waiting is None:
                self._queue.put(None)
        return records, users

    def _write(self, records: list[Record]) -> bool:
        """Adds a frame. Returns whether it may be shown."""
        if self._error and time.monotonic() - self._failed_at < RETRY_S:
            raise StoreError(self._error)
        data = frame_of(records)
        owned = self._writer.write(self.part, data)
        self.contents.setdefault(self.part, set()).update([one.answer for one in records])
        self._error = ""
        self._length += len(data)
        if self._length > PART_BYTES:
            self._next_part()
        return owned

    def _next_part(self) -> None:
        self._length = 0
        self.part += 1

    def _failed(self, problem: str) -> StoreError:
        self._failed_at = time.monotonic()
        if problem != self._error:
            log.error("answers are not kept, but given: %s", problem)
        self._error = problem
        return StoreError(problem)


def _deliver(records: list[Record], users: list[LogUser], owned: bool, error: StoreError | None) -> None:
    for record, user in zip(records, users, strict=True):
        try:
            user.committed(record, owned, error)
        except Exception:  # the other streams of the batch go on
            log.exception("the answer %s could not be shown", record.answer)


def frame_of(records: list[Record]) -> bytes:
    """Returns records as a part has them."""
    data = _ENCODER.encode(records)
    head = HEAD.pack(MAGIC, len(data), zlib.crc32(data))
    return b"".join((head, SUM.pack(zlib.crc32(head)), data))


class _Part:
    """What was read of a part."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.damaged = False
        self.at = 0  # the position after the last whole frame

    def read_on(self, added: bytes) -> None:
        """Reads the whole frames that were added. A frame whose end is missing was never shown: it may come yet."""
        data, at = memoryview(added), 0
        while not self.damaged and len(data) - at >= FRAME:
            head = data[at : at + HEAD.size]
            magic, length, checksum = HEAD.unpack(head)
            if magic != MAGIC or SUM.unpack_from(data, at + HEAD.size)[0] != zlib.crc32(head):
                self.damaged = any(data[at:])  # after a power cut, zeros may stand for what was not yet written
                break
            if len(data) - at < FRAME + length:
                break
            body = data[at + FRAME : at + FRAME + length]
            if zlib.crc32(body) != checksum:
                self.damaged = True
                break
            for one in _DECODER.decode(body):
                self.records[one.answer].append(one)
            at += FRAME + length
        self.at += at


class _Reader:
    """The parts of the logs of one process, each read once."""

    def __init__(self, book: Logbook) -> None:
        self.used_at = 0.0
        self._book = book
        self._parts: dict[LogPart, _Part] = {}  # in their order

    def read_on(self, db: Connection, owner: str) -> None:
        self.used_at = time.monotonic()
        known = self._parts  # what is there no more is in the store
        self._parts = {
            part: known.get(part) or _Part()
            for part in _in_order(self._book.parts(db))
            if part.owner == owner and part.part is not None
        }
        for part, read in self._parts.items():
            read.read_on(self._book.read(db, part, read.at))

    def records(self, id: str) -> list[Record]:
        return [one for read in self._parts.values() for one in read.records.get(id, ())]

    @property
    def damaged(self) -> bool:
        return any(read.damaged for read in self._parts.values())


class Logs:
    """The logs of all processes with the same store. All but `current` is for the store's thread."""

    def __init__(self, book: Logbook, owner: str, problem: Callable[[], str]) -> None:
        self.book = book
        self._owner, self._problem = owner, problem
        self._logs: list[StreamLog] = []  # of this process; the last one is written
        self._readers: dict[str, _Reader] = {}
        self._tidied_at, self._tidied = -TIDY_S, (0, 0)

    def current(self) -> StreamLog:
        """Returns the log for an answer that begins or is claimed now. An answer never changes its log."""
        if not self._logs or self._logs[-1].is_over():
            self._logs.append(StreamLog(self.book.writer(self._owner, len(self._logs)), self._problem))
        return self._logs[-1]

    async def close(self) -> None:
        for one in self._logs:
            await one.close()

    def records(self, db: Connection, owner: str, id: str) -> Sequence[Record]:
        """Returns what the log of a process has of an answer. Empty if that process has been taken over from.

        Raises Damaged.
        """
        logs = {part.log for part in self.book.parts(db) if part.owner == owner}
        reader = self._read(db, owner)
        fences = {part.log for part in self.book.parts(db) if part.owner == owner and part.part is None}
        if not logs <= fences:  # what was read may have been written afterwards
            return ()
        if reader.damaged or not self.book.survived(owner):
            raise Damaged
        return reader.records(id)

    def claim(self, db: Connection, id: str, log: StreamLog) -> KeptAnswer | None:
        """Makes this process the owner of a running answer whose process is gone; `log` is to be its log.

        None: it has ended, or its process lives.
        """
        log.prepare()
        owner = answers.left_by(db, id, self._owner)
        if owner:
            self._take(db, owner)
        return answers.claim(db, id, self._owner) if owner is not None else None

    def release(self, db: Connection, id: str, epoch: int, shown: int) -> None:
        """Gives an answer of this process up, with all that its log has of it. shown: how many bytes were shown"""
        self._extend(db, self._owner)
        answers.release(db, id, epoch, shown)

    def due(self) -> bool:
        """Whether there may be parts that are not needed any more."""
        return time.monotonic() - self._tidied_at > TIDY_S or self._state() != self._tidied

    def tidy(self, db: Connection, *, leaving: bool = False) -> list[LogPart]:
        """Finds the parts that are not needed, and moves to the store what is in parts that are to go all the same.

        Returns the parts that can be deleted when that is committed. leaving: whether this process's log is not needed
        any more, too
        """
        self._tidied_at, self._tidied = time.monotonic(), self._state()
        own, done, owners = list[LogPart](), list[LogPart](), set[str]()
        written = (len(self._logs) - 1, self._logs[-1].part) if self._logs else (0, 0)
        parts = _in_order(self.book.parts(db))
        self._forget_deleted({(part.log, part.part) for part in parts if part.owner == self._owner}, written)
        for part in parts:
            if part.owner == self._owner:
                at = (part.log, written[1] if part.part is None else part.part)  # a fence stays as long as its log
                own += [part] if at < written or leaving else []
            elif part.owner in owners or not answers.lives(db, part.owner):
                owners.add(part.owner)
                done.append(part)
        needed = self._needed(db, own)
        if needed and (leaving or len(needed) > MOST_PARTS or needed[0].log < written[0]):
            self._extend(db, self._owner)
            needed = []
        done += [part for part in own if part not in needed]
        for owner in owners:
            self._take(db, owner)
        unused, ended = time.monotonic() - UNUSED_S, owners | {self._owner}
        for owner in [owner for owner, one in self._readers.items() if one.used_at < unused or owner in ended]:
            del self._readers[owner]
        return done

    def _forget_deleted(self, existing: set[tuple[int, int | None]], written: tuple[int, int]) -> None:
        """Forgets what was in parts that are deleted. written: the part in use before `existing` was read"""
        for number, one in enumerate(self._logs):
            for part in [part for part in list(one.contents) if (number, part) < written]:
                if (number, part) not in existing:
                    del one.contents[part]

    def _needed(self, db: Connection, parts: Sequence[LogPart]) -> list[LogPart]:
        """Returns which of these parts of this process's logs have records of answers that run."""
        running = {id for id, _ in answers.owned(db, self._owner)}
        return [
            part
            for part in parts
            if part.part is not None and running & self._logs[part.log].contents.get(part.part, set())
        ]

    def _state(self) -> tuple[int, int]:
        return (len(self._logs), self._logs[-1].part) if self._logs else (0, 0)

    def _take(self, db: Connection, owner: str) -> None:
        """Ends the log of a process that is gone, and moves what it has to the store."""
        for part in self.book.parts(db):
            if part.owner == owner and part.part is None:
                self.book.remove_fence(db, part)
        self._extend(db, owner)

    def _extend(self, db: Connection, owner: str) -> None:
        reader = self._read(db, owner)
        if self.book.survived(owner):
            answers.extend(db, owner, lambda id: None if reader.damaged else reader.records(id))
        else:
            answers.lose(db, owner)

    def _read(self, db: Connection, owner: str) -> _Reader:
        reader = self._readers.setdefault(owner, _Reader(self.book))
        reader.read_on(db, owner)
        return reader


def _in_order(parts: Sequence[LogPart]) -> list[LogPart]:
    """Returns parts in the order in which they were written, a fence before its parts."""
    return sorted(parts, key=lambda one: (one.owner, one.log, -1 if one.part is None else one.part))
