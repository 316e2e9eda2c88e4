"""All kept answers, as one frontend sees them: those that it generates itself, and those in the store.

Any frontend with the same store answers for any of them. If another process generates an answer, its
stream is read from the store. If that process is gone, this one claims the answer and goes on with it.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial

from frontend.errors import NotFound, SluiceError
from frontend.kept import answers, usage
from frontend.kept.answers import KeptAnswer
from frontend.kept.batch_runner import BatchRunner
from frontend.kept.database import Connection, Damaged, StoreError
from frontend.kept.run import CANCELLED, Run, with_fields
from frontend.kept.store import Store, database_of
from frontend.kept.stream_log import Logs, StreamLog
from frontend.kept.usage import REFRESH_S, HeldStreams, Stored, Usage
from shared.config.frontend import FrontendConfig

log = logging.getLogger("sluice.frontend")
TAIL_S = 0.05  # pause between two looks at a stream that another process writes
WATCH_S = 1.0  # pause between two looks for answers to cancel, and for those whose process is gone
# Goes on with an answer that this process has claimed, and writes it to this log.
Resume = Callable[[KeptAnswer, StreamLog], Awaitable[Run]]


class Kept:
    """The kept answers of a server. `resume` is set by the routes, which know the API formats."""

    def __init__(self, config: FrontendConfig) -> None:
        database = database_of(config.store)
        book = database.logbook()
        owner = book.owner(f"{os.getpid()}-{secrets.token_hex(8)}")
        self.store = Store(database, owner, max_age_s=config.store_max_age, max_bytes=config.store_max_bytes)
        self.logs = Logs(book, owner, lambda: self.store.problem)
        self.batches = BatchRunner(self.store, config.batch_lines)
        self.usage = Usage(self.store, config.store_max_key_bytes)
        self.held = HeldStreams()
        self.stored: dict[str, Stored] = {}  # what each key has, as it was counted last
        self.config = config
        self.window_s, self.keepalive_s = config.resume_window, config.keepalive_s
        self.runs: dict[str, Run] = {}
        self._resuming: dict[str, asyncio.Task[Run]] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self, resume: Resume, ready: Callable[[], bool]) -> None:
        """Opens the store, and goes on with answers of the background whenever this process is `ready`."""
        self._resume = resume
        self.store.start()
        self._watching = asyncio.create_task(self._watch(ready))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.batches.close()
        await self.logs.close()
        with suppress(StoreError):  # what stays is moved to the store by another process
            await self._tidy(leaving=True)
        await self.store.close()

    # what this process generates

    def gone(self, run: Run) -> None:
        if self.runs.get(run.answer.id) is run:
            del self.runs[run.answer.id]

    async def begin(self, run: Run) -> None:
        """Writes a run's answer before its first byte, if its stream is to be kept, and starts it.

        A run that has a problem already is not kept.
        """
        answer, self.runs[run.answer.id] = run.answer, run
        if not run.problem and not run.manner.logged:
            run.problem = self.store.problem
        elif not run.problem:
            inserted = False
            try:
                replaced = await self.store.write(partial(_insert_logged, answer, run.log))
                inserted = True
                if replaced:  # or else, after a power cut, the id would be that of another stream again
                    await self.store.sync()
            except StoreError as exc:
                run.problem = exc.message
                if inserted or exc.uncertain:
                    self.store.insist(partial(answers.delete, id=answer.id))
            else:
                for id in replaced:
                    if (old := self.runs.get(id)) is not None and not old.answer.listed:
                        old.cancel()
        run.begin()

    # what anyone may ask for

    async def find(self, id: str, tenant: str) -> KeptAnswer:
        """Returns an answer of this tenant. Raises NotFound, also for an answer of another tenant, and StoreError."""
        found = await self.store.read(partial(answers.find, id=id, tenant=tenant))
        if found is None or not found.listed:
            raise NotFound(f"there is no response {id!r:.80}", code="response_not_found")
        return found

    async def find_stream(self, stream_id: str, tenant: str) -> KeptAnswer:
        """Returns the answer with this id of a stream. Raises NotFound and StoreError."""
        found = await self.store.read(partial(answers.find_stream, stream_id=stream_id, tenant=tenant))
        if found is None:
            raise NotFound(f"there is no stream {stream_id!r:.80}", code="stream_not_found")
        return found

    async def cancel(self, answer: KeptAnswer) -> None:
        """Ends an answer, wherever it is generated."""
        if answer.ended is not None:
            return
        if (run := await self._own(answer)) is not None:
            run.cancel()
            await run.finished()
        else:
            await self.store.write(partial(answers.cancel, id=answer.id))

    async def delete(self, answer: KeptAnswer) -> None:
        await self.cancel(answer)
        await self.store.write(partial(answers.delete, id=answer.id))
        await self.store.sync()

    async def take_up(self, answer: KeptAnswer) -> Run | None:
        """Goes on with a running answer whose process is gone. Raises SluiceError if this is not possible now.

        Returns its run if it is this process that generates it.
        """
        return await self._own(answer) if answer.ended is None else None

    async def follow(self, answer: KeptAnswer, offset: int) -> AsyncIterator[bytes]:
        """Yields the bytes of a stream from `offset` on, from whichever process generates it, until it has ended."""
        while True:
            if answer.ended is None and (run := await self._own(answer)) is not None:
                async for data in run.read(offset):
                    offset += len(data)
                    yield data
                return
            while data := await self._stored(answer, offset):
                offset += len(data)
                yield data
            if answer.ended is not None:
                return
            await asyncio.sleep(TAIL_S)
            answer = await self._again(answer)

    async def written(self, answer: KeptAnswer, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields the bytes of a stream that there are now, from `offset` on, in slices."""
        while True:
            run = self.runs.get(answer.id)
            data = await self._stored(answer, offset) if run is None else run.since(offset)
            if not data:
                return
            offset += len(data)
            yield data
            await asyncio.sleep(0)  # others have a turn

    async def _stored(self, answer: KeptAnswer, start: int) -> bytes:
        """Returns a slice from `start` on of a stream that another process generates, or that has ended."""
        return await self.store.read(partial(answers.bytes_of, id=answer.id, start=start, records=self.logs.records))

    async def _again(self, answer: KeptAnswer) -> KeptAnswer:
        found = await self.store.read(partial(answers.find, id=answer.id, tenant=answer.tenant))
        if found is None:
            raise NotFound("the answer was deleted", code="response_not_found")
        return found

    async def _own(self, answer: KeptAnswer) -> Run | None:
        """Returns this process's run of a running answer; takes it over if its owner is gone. None: the owner lives."""
        if (run := self.runs.get(answer.id)) is not None:
            return run
        if answer.id not in self._resuming:
            log = self.logs.current()
            claimed = await self.store.write(partial(self.logs.claim, id=answer.id, log=log))
            if claimed is None:
                return self.runs.get(answer.id)
            if claimed.cancelled:
                await self.store.write(partial(_end_cancelled, claimed))
                return None
            self._resuming[answer.id] = asyncio.create_task(self._resumed(claimed, log))
        return await asyncio.shield(self._resuming[answer.id])

    async def _resumed(self, claimed: KeptAnswer, log: StreamLog) -> Run:
        """Goes on with a claimed answer. If this is not possible now, gives it up again."""
        try:
            run = self.runs[claimed.id] = await self._resume(claimed, log)
        except Damaged:
            self.store.insist(partial(answers.fail, id=claimed.id))
            raise
        except BaseException:
            self.store.insist(partial(answers.release, id=claimed.id, epoch=claimed.epoch, shown=0))
            raise
        finally:
            self._resuming.pop(claimed.id, None)
        return run

    async def _watch(self, ready: Callable[[], bool]) -> None:
        counted = -REFRESH_S
        while True:
            await asyncio.sleep(WATCH_S)
            with suppress(StoreError):
                await self._look(ready())
                if self.config.keyed and time.monotonic() - counted >= REFRESH_S:
                    counted = time.monotonic()
                    self.stored = await usage.of_all(self.store)

    async def _look(self, ready: bool) -> None:
        await self._look_at_own()
        if self.logs.due():
            await self._tidy()
        for id in await self.store.read(answers.orphans) if ready else ():
            try:
                found = await self.store.read(partial(answers.any_of, id=id))
                if found is not None:
                    await self._own(found)
            except Damaged:
                log.error("answer %s has failed: it is damaged in the store", id)
                await self.store.write(partial(answers.fail, id=id))
            except SluiceError as exc:
                log.warning("answer %s waits to be continued: %s", id, exc)

    async def _look_at_own(self) -> None:
        """Ends the runs whose answers another process has cancelled, deleted or taken over."""
        runs = [run for run in self.runs.values() if run.logged and run.begun]
        if not runs:
            return
        owned = await self.store.read(partial(answers.owned, owner=self.store.owner))
        for run in runs:
            cancelled = owned.get((run.answer.id, run.answer.epoch))
            if cancelled:
                run.cancel()
            elif cancelled is None and run.logged:
                run.disowned()

    async def _tidy(self, *, leaving: bool = False) -> None:
        parts = await self.store.write(partial(self.logs.tidy, leaving=leaving))
        if parts:
            await self.store.read(partial(self.logs.book.delete, parts=parts))


def _insert_logged(answer: KeptAnswer, log: StreamLog, db: Connection) -> list[str]:
    log.prepare()
    return answers.insert(db, answer)


def _end_cancelled(answer: KeptAnswer, db: Connection) -> None:
    response = with_fields(answer.response, status=CANCELLED) if answer.response else None
    answers.end(db, answer.id, answer.epoch, CANCELLED, response, None)
