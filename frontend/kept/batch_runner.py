"""Works on the batches of a store, as one of several processes: reads their lines, has them answered, ends them.

A line is answered as if it were a request of its own (`call`), a few lines at a time, and fewer while clients wait for
other answers of this process. What a line gets from an overloaded or stopping server is no outcome: the line is given
back, and taken again later. Only its own outcome, or the end of its batch, ends it.
"""

import asyncio
import logging
import time
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from frontend.errors import NotFound
from frontend.kept import batches, files
from frontend.kept.batches import Batch, Line
from frontend.kept.database import StoreError
from frontend.kept.store import RETRY_S, Store

log = logging.getLogger("sluice.frontend")
LOOK_S = 0.5  # pause between two looks for work
BACK_OFF_S = 1.0  # pause after a line that the server could not take
BESIDE = 1  # how many lines run while requests of clients run
MOST_READING = 2  # inputs that a process reads at a time, each of another tenant: their lines take a thread long
MAX_FAILURES = 3  # a line on which the server has failed so often is answered with its last error


@dataclass(frozen=True, slots=True)
class Answer:
    """What a line got. passing: whether the server could not take it now, so that it is to be sent again"""

    status: int
    body: bytes
    request_id: str
    passing: bool = False


DAMAGED = Answer(
    500, msgspec.json.encode({"error": {"message": "the line is damaged in the store", "code": "line_damaged"}}), ""
)  # fmt: skip


class LineReader(Protocol):
    """Reads the lines of an input file, piece by piece. `errors` has what is wrong with them, `total` their number."""

    errors: list[dict[str, Any]]
    total: int

    def feed(self, data: bytes, *, last: bool = False) -> list[tuple[int, str, bytes]]: ...


class BatchFormat(Protocol):
    """The form of an API's batches: how lines are read, and how outcomes are written. Outcomes end with a line break.

    answered: writes the outcome of a line
    unanswered: writes the outcome of a line that ends with its batch, by the state it gets
    """

    def reader(self, batch: Batch) -> LineReader: ...
    def answered(self, line: Line, answer: Answer) -> bytes: ...
    def unanswered(self, batch: str, number: int, custom_id: str, state: str) -> bytes: ...


Call = Callable[[Batch, Line], Awaitable[Answer]]


class BatchRunner:
    """The work of one process."""

    def __init__(self, store: Store, most: int) -> None:
        """most: how many lines are answered at a time"""
        self._store, self._most = store, most
        self._lines: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._readers = set[str]()  # the tenants of the batches in _reading
        self._wake = asyncio.Event()
        self._paused_until = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(
        self,
        call: Call,
        formats: Mapping[str, BatchFormat],
        ready: Callable[[], bool],
        busy: Callable[[], bool],
        ended: Callable[[str, int], None],
    ) -> None:
        """
        call: answers a line
        ready: whether this process can compute
        busy: whether clients wait for answers of this process
        ended: called with a state, and with the number of lines that this process has given it
        """
        self._call, self._formats, self._ready, self._busy = call, formats, ready, busy
        self._ended = ended
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends all work, and leaves it to other processes."""
        tasks = [one for one in (self._watching, *self._lines.values(), *self._reading.values()) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """Looks for work now."""
        self._wake.set()

    async def _watch(self) -> None:
        while True:
            with suppress(StoreError):
                await self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()

    async def _look(self) -> None:
        found = await self._store.read(batches.open_batches)
        now, running = time.time(), []
        for batch in found:
            if batch.status == batches.FINALIZING:
                await self._finish(batch)
            elif batch.status == batches.CANCELLING or batch.expires < now:
                await self._end_early(batch)
            elif batch.status == batches.VALIDATING:
                await self._read(batch)
            else:
                running.append(batch)
        self._cancel({one.id for one in running})
        if running and self._ready() and time.monotonic() >= self._paused_until:
            await self._fill(running)

    def _cancel(self, running: set[str]) -> None:
        """Ends the lines of batches that do not run any more."""
        for (id, _), task in list(self._lines.items()):
            if id not in running:
                task.cancel()

    # lines

    async def _fill(self, running: Sequence[Batch]) -> None:
        """Takes lines, one batch after the other, until as many run as may; ends batches without lines."""
        waiting = deque(in_turns(running))
        while waiting and (free := (BESIDE if self._busy() else self._most) - len(self._lines)) > 0:
            batch = waiting.popleft()
            most = 1 if waiting else free
            lines = await self._store.write(partial(batches.take, id=batch.id, owner=self._store.owner, most=most))
            for line in lines:
                key = (line.batch, line.number)
                self._lines[key] = task = asyncio.create_task(self._answer(batch, line))
                task.add_done_callback(partial(self._done, key))
            if lines:
                waiting.append(batch)
            elif await self._store.read(partial(batches.waiting, id=batch.id)) == (0, 0):
                await self._end(batch)

    def _done(self, key: tuple[str, int], task: "asyncio.Task[None]") -> None:
        del self._lines[key]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("line %d of batch %s failed", key[1], key[0], exc_info=error)

    async def _answer(self, batch: Batch, line: Line) -> None:
        failed, ended = False, False
        try:
            answer = await self._call(batch, line) if line.body else DAMAGED
            failed = answer.status >= 500 and not answer.passing
            if answer.passing or (failed and line.failures + 1 < MAX_FAILURES):
                self._paused_until = time.monotonic() + BACK_OFF_S
                return
            state = batches.SUCCEEDED if answer.status == 200 else batches.ERRORED
            data = self._formats[batch.format].answered(line, answer)
            packed = await asyncio.to_thread(zlib.compress, data, 1)
            await self._write(line, state, packed, len(data))
            ended = True
        finally:
            if not ended:
                work = partial(batches.give_back, line=line, owner=self._store.owner, failed=failed)
                self._store.post(work, lambda value, error: None)

    async def _write(self, line: Line, state: str, packed: bytes, size: int) -> None:
        """Writes an outcome, as soon as the store can be written."""
        work = partial(
            batches.end_line, line=line, owner=self._store.owner, state=state, packed=packed, size=size
        )  # fmt: skip
        while True:
            try:
                self._ended(state, await self._store.write(work))
                return
            except StoreError:
                await asyncio.sleep(RETRY_S)

    # the ends of a batch

    async def _end(self, batch: Batch) -> None:
        if await self._store.write(partial(batches.begin_end, id=batch.id, before=batch.status)):
            batch.status, batch.times[batches.FINALIZING] = batches.FINALIZING, int(time.time())
            await self._finish(batch)

    async def _end_early(self, batch: Batch) -> None:
        """Ends a batch that was cancelled or is late, when no process works on its lines any more."""
        self._cancel_lines(batch.id)
        if (task := self._reading.get(batch.id)) is not None:
            task.cancel()
            return
        _, running = await self._store.read(partial(batches.waiting, id=batch.id))
        if not running:
            await self._end(batch)

    def _cancel_lines(self, id: str) -> None:
        for (one, _), task in list(self._lines.items()):
            if one == id:
                task.cancel()

    async def _finish(self, batch: Batch) -> None:
        """Gives the lines that are left their outcome, and makes the output files. Several processes may do so."""
        state = batches.DROPPED if batches.CANCELLING in batch.times else batches.LATE
        chosen = self._formats[batch.format]
        while left := await self._store.read(partial(batches.unanswered, id=batch.id)):
            made = [(number, chosen.unanswered(batch.id, number, custom, state)) for number, custom in left]
            ended = [(number, zlib.compress(data, 1), len(data)) for number, data in made]
            await self._store.write(partial(batches.close_lines, id=batch.id, state=state, ended=ended))
            self._ended(state, len(ended))
        await self._store.write(partial(batches.finish, id=batch.id))

    # reading the input

    async def _read(self, batch: Batch) -> None:
        if batch.tenant in self._readers or len(self._readers) >= MOST_READING:
            return
        if await self._store.write(partial(batches.claim, id=batch.id, owner=self._store.owner)):
            self._readers.add(batch.tenant)
            self._reading[batch.id] = task = asyncio.create_task(self._validate(batch))
            task.add_done_callback(partial(self._read_to_end, batch.id, batch.tenant))

    def _read_to_end(self, id: str, tenant: str, task: "asyncio.Task[None]") -> None:
        del self._reading[id]
        self._readers.discard(tenant)
        self._wake.set()
        if task.cancelled() or task.exception() is not None:
            self._store.post(partial(batches.release, id=id, owner=self._store.owner), lambda value, error: None)
            if not task.cancelled() and not isinstance(task.exception(), StoreError):
                log.error("the lines of batch %s could not be read", id, exc_info=task.exception())

    async def _validate(self, batch: Batch) -> None:
        reader, owner, size = self._formats[batch.format].reader(batch), self._store.owner, 0
        try:
            file = await files.existing(self._store, batch.input_file, batch.tenant)
            async for data in files.content(self._store, file):
                size += len(data)
                lines = await asyncio.to_thread(reader.feed, data)
                if not await self._store.write(partial(batches.add_lines, id=batch.id, owner=owner, lines=lines)):
                    return
                if reader.errors:
                    break
            lines = await asyncio.to_thread(reader.feed, b"", last=True)
            await self._store.write(partial(batches.add_lines, id=batch.id, owner=owner, lines=lines))
        except NotFound as exc:
            reader.errors.append({"code": "file_not_found", "line": None, "message": exc.message, "param": None})
        await self._store.write(
            partial(
                batches.validated, id=batch.id, owner=owner, errors=reader.errors, total=reader.total, size=size
            )
        )  # fmt: skip


def in_turns(running: Iterable[Batch]) -> list[Batch]:
    """Returns batches in the order in which they get lines: the first of each tenant, then the second of each."""
    before = Counter[str]()
    placed = []
    for batch in running:
        placed.append((before[batch.tenant], batch))
        before[batch.tenant] += 1
    return [batch for _, batch in sorted(placed, key=lambda one: one[0])]
