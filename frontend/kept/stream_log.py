"""The logs of running streams: files beside the store, to which bytes are appended before a client gets them.

A process has a log of its own, which a thread of its own writes. All records that the event loop makes in a turn are
one frame, written at once, so many streams share the cost, and no other process's lock is waited for. What ends
is moved to the store as a whole; what still runs when a file is full, too, and then the file is deleted. A write
survives the end of its process, as a write to the store does; a power cut may lose the last ones.

`STORE-streams-OWNER-K` is the *fence* of a process's log number K. While it exists, its process may show what it
has written. Another process that takes answers over removes the fence first, and then reads the files
`STORE-streams-OWNER-K.N`. A process looks at its fence after each write, so a reader never gets a byte that the new
owner does not know, however long the old one was stopped between two instructions. There is no clock in that.

Functions that take a connection run in the store's thread (see answers.py).
"""

import asyncio
import logging
import os
import queue
import re
import sqlite3
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from frontend.kept import answers
from frontend.kept.answers import KeptAnswer, Record
from frontend.kept.store import RETRY_S, Damaged, StoreError

log = logging.getLogger("sluice.frontend")
MAGIC = b"SLF1"
HEAD = struct.Struct("<4sII")  # magic, length and checksum of a frame
SUM = struct.Struct("<I")  # of the head itself, which follows it
FRAME = HEAD.size + SUM.size
FILE_BYTES = 8 << 20  # a file that is larger gets no more frames
TIDY_S = 60.0  # interval between two looks for logs of processes that are gone
UNUSED_S = 10.0  # what was read of a log is forgotten when nobody has asked for it for so long
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Record])


class LogUser(Protocol):
    """What waits for its record: a Run."""

    def committed(self, record: Record, owned: bool, error: StoreError | None) -> None:
        """Called in the loop when a record is written.

        owned: whether its bytes may be shown; False: another process has taken over
        """


_Batch = list[tuple[Record, LogUser]]


class StreamLog:
    """One log of this process. `ended`: nothing more can be written to it, and the process needs another one."""

    def __init__(self, store: Path, owner: str, number: int, problem: Callable[[], str]) -> None:
        """problem: returns why the store cannot be used now; nothing is kept then"""
        self.ended = False
        self.file = 0  # the number of the file that is written now
        self.path = store.with_name(f"{store.name}-streams-{owner}-{number}")
        self._store_problem = problem
        self._fence = self._file = -1
        self._length = 0  # of the file
        self._error, self._failed_at = "", -RETRY_S
        self._pending: _Batch = []
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
        self._loop = asyncio.get_running_loop()

    def prepare(self) -> None:
        """Makes the fence, before an answer is written to the store that is to be logged here. In the store's thread.

        Raises StoreError, also for RETRY_S after a write that failed.
        """
        if self._error and time.monotonic() - self._failed_at < RETRY_S:
            raise StoreError(self._error)
        if self._fence < 0 and not self.ended:
            try:
                self._fence = _made(self.path)
            except OSError as exc:
                raise StoreError(f"{self.path}: {exc.strerror}") from exc
            self._thread.start()

    def add(self, record: Record, user: LogUser) -> None:
        """Writes a record together with all others of this turn of the loop, and then calls the user."""
        if not self._pending:
            self._loop.call_soon(self._hand_over)
        self._pending.append((record, user))

    def _hand_over(self) -> None:
        self._queue.put(self._pending)
        self._pending = []

    async def close(self) -> None:
        """Ends the thread after everything that was added before. The files stay."""
        if self._pending:
            self._hand_over()
        self._queue.put(None)
        if self._thread.is_alive():
            await self._loop.run_in_executor(None, self._thread.join)
        self.ended = True
        for file in (self._fence, self._file):
            if file >= 0:
                os.close(file)
        self._fence = self._file = -1

    # the thread

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            owned, error = True, None
            try:
                if problem := self._store_problem():
                    raise StoreError(problem)
                self._write([record for record, _ in waiting])
                owned = self._owned()
            except StoreError as exc:
                error = exc
            except OSError as exc:
                error = self._failed(exc)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_deliver, waiting, owned, error)

    def _write(self, records: list[Record]) -> None:
        """Appends a frame. Raises OSError, and leaves no half of it in a file that gets more."""
        if self._error and time.monotonic() - self._failed_at < RETRY_S:
            raise StoreError(self._error)
        if self._file < 0:
            self._file, self._length = _made(self.path.with_name(f"{self.path.name}.{self.file}")), 0
        data = frame_of(records)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._length)
            self._next_file()
            raise
        self._error = ""
        self._length += len(data)
        if not os.fstat(self._file).st_nlink and os.fstat(self._fence).st_nlink:
            self.ended = True
            raise FileNotFoundError(2, "a file of running streams was deleted", str(self.path))
        if self._length > FILE_BYTES:
            self._next_file()

    def _next_file(self) -> None:
        os.close(self._file)
        self._file = -1
        self.file += 1

    def _owned(self) -> bool:
        """Whether the fence is there."""
        owned = bool(os.fstat(self._fence).st_nlink)
        self.ended = self.ended or not owned
        return owned

    def _failed(self, exc: OSError) -> StoreError:
        problem, self._failed_at = f"{self.path}: {exc.strerror}", time.monotonic()
        if problem != self._error:
            log.error("answers are not kept, but given: %s", problem)
        self._error = problem
        return StoreError(problem)


def _deliver(batch: _Batch, owned: bool, error: StoreError | None) -> None:
    for record, user in batch:
        try:
            user.committed(record, owned, error)
        except Exception:  # the other streams of the batch go on
            log.exception("the answer %s could not be shown", record.answer)


def _made(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def frame_of(records: list[Record]) -> bytes:
    """Returns records as a file has them."""
    data = _ENCODER.encode(records)
    head = HEAD.pack(MAGIC, len(data), zlib.crc32(data))
    return b"".join((head, SUM.pack(zlib.crc32(head)), data))


class _File:
    """What was read of a file."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.damaged = False
        self._at = 0

    def read_on(self, path: Path) -> None:
        """Reads the whole frames that were added. A frame whose end is missing was never shown: it may come yet."""
        with path.open("rb") as file:
            file.seek(self._at)
            data = memoryview(file.read())
        at = 0
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
        self._at += at


class _Reader:
    """The files of one process, each read once."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self._files: dict[tuple[int, int], _File] = {}

    def read_on(self, paths: dict[tuple[int, int], Path]) -> None:
        self.used_at = time.monotonic()
        self._files = {which: one for which, one in self._files.items() if which in paths}
        for which, path in paths.items():
            with suppress(FileNotFoundError):  # what it had is in the store
                self._files.setdefault(which, _File()).read_on(path)

    def records(self, id: str) -> list[Record]:
        return [one for which in sorted(self._files) for one in self._files[which].records.get(id, ())]

    @property
    def damaged(self) -> bool:
        return any(file.damaged for file in self._files.values())


class Logs:
    """The logs of all processes with the same store. All but `current` is for the store's thread."""

    def __init__(self, store: Path, owner: str, problem: Callable[[], str]) -> None:
        self._store, self._owner, self._problem = store, owner, problem
        self._name = re.compile(re.escape(store.name) + r"-streams-(?P<owner>.+)-(?P<log>\d+)(?:\.(?P<file>\d+))?")
        self._logs: list[StreamLog] = []  # of this process; the last one is written
        self._readers: dict[str, _Reader] = defaultdict(_Reader)
        self._tidied_at, self._tidied = -TIDY_S, (0, 0)

    def current(self) -> StreamLog:
        """Returns the log for an answer that begins or is claimed now. An answer never changes its log."""
        if not self._logs or self._logs[-1].ended:
            self._logs.append(StreamLog(self._store, self._owner, len(self._logs), self._problem))
        return self._logs[-1]

    async def close(self) -> None:
        for one in self._logs:
            await one.close()

    def records(self, owner: str, id: str) -> Sequence[Record]:
        """Returns what the log of a process has of an answer. Empty if that process has been taken over from.

        Raises Damaged.
        """
        logs = {log for owned, log, _, _ in self._files() if owned == owner}
        reader = self._read(owner)
        fences = {log for owned, log, file, _ in self._files() if owned == owner and file is None}
        if not logs <= fences:  # what was read may have been written afterwards
            return ()
        if reader.damaged:
            raise Damaged
        return reader.records(id)

    def claim(self, db: sqlite3.Connection, id: str, log: StreamLog) -> KeptAnswer | None:
        """Makes this process the owner of a running answer whose process is gone; `log` is to be its log.

        None: it has ended, or its process lives.
        """
        log.prepare()
        owner = answers.left_by(db, id, self._owner)
        if owner:
            self._take(db, owner)
        return answers.claim(db, id, self._owner) if owner is not None else None

    def release(self, db: sqlite3.Connection, id: str, epoch: int, shown: int) -> None:
        """Gives an answer of this process up, with all that its log has of it. shown: how many bytes were shown"""
        self._extend(db, self._owner)
        answers.release(db, id, epoch, shown)

    def due(self) -> bool:
        """Whether there may be files that are not needed any more."""
        return time.monotonic() - self._tidied_at > TIDY_S or self._state() != self._tidied

    def tidy(self, db: sqlite3.Connection, *, leaving: bool = False) -> list[Path]:
        """Moves what is in full files, and in logs of processes that are gone, to the store.

        Returns the files that can be deleted when that is committed. leaving: whether this process's log is not needed
        any more, too
        """
        self._tidied_at, self._tidied = time.monotonic(), self._state()
        done, owners = list[Path](), set[str]()
        written = (len(self._logs) - 1, self._logs[-1].file) if self._logs else (0, 0)
        for owner, number, file, path in self._files():
            if owner == self._owner:
                old = number < written[0] or (number == written[0] and file is not None and file < written[1])
                done += [path] if old or leaving else []
            elif owner in owners or not answers.lives(db, owner):
                owners.add(owner)
                done.append(path)
        if done:
            self._extend(db, self._owner)
        for owner in owners:
            self._take(db, owner)
        unused, ended = time.monotonic() - UNUSED_S, owners | {self._owner}
        for owner in [owner for owner, one in self._readers.items() if one.used_at < unused or owner in ended]:
            del self._readers[owner]
        return done

    def _state(self) -> tuple[int, int]:
        return (len(self._logs), self._logs[-1].file) if self._logs else (0, 0)

    def _take(self, db: sqlite3.Connection, owner: str) -> None:
        """Ends the log of a process that is gone, and moves what it has to the store."""
        for path in [path for owned, _, file, path in self._files() if owned == owner and file is None]:
            path.unlink(missing_ok=True)
        self._extend(db, owner)

    def _extend(self, db: sqlite3.Connection, owner: str) -> None:
        reader = self._read(owner)
        answers.extend(db, owner, lambda id: None if reader.damaged else reader.records(id))

    def _read(self, owner: str) -> _Reader:
        reader = self._readers[owner]
        found = self._files()
        reader.read_on({(log, file): path for owned, log, file, path in found if owned == owner and file is not None})
        return reader

    def _files(self) -> list[tuple[str, int, int | None, Path]]:
        """Returns owner, number of the log, number of the file (None: the fence) and path of each file, in order."""
        found = []
        for name in os.listdir(self._store.parent):
            if which := self._name.fullmatch(name):
                file = None if which["file"] is None else int(which["file"])
                found.append((which["owner"], int(which["log"]), file, self._store.with_name(name)))
        return sorted(found, key=lambda one: (one[0], one[1], -1 if one[2] is None else one[2]))


def delete_files(paths: Iterable[Path]) -> None:
    """Deletes files, as far as that is possible now."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
