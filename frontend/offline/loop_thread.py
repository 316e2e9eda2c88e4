"""An event loop in a thread of its own, for callers that have none or another one. Knows no requests.

Work is handed over as a function that is given `put`; what it puts comes out, in order, of a generator on the
caller's side, which raises what the work raised. Closing the generator cancels the work.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")

Put = Callable[[T], None]
Work = Callable[[Put[T]], Coroutine[Any, Any, None]]


class Closed(Exception):
    """It was closed before the work was done."""


class LoopThread(Generic[R]):
    """Holds what `opening` opens, on its own loop, until `close`."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        """Returns when it is open; raises what kept it from opening."""
        self._opened: Future[R] = Future()
        self._jobs: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(opening,), name="sluice", daemon=True)
        self._thread.start()
        try:
            self.held = self._opened.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def close(self) -> None:
        """Cancels what runs, closes what is open, ends the thread. Idempotent."""
        if os.getpid() != self._pid:  # in a fork: the thread is not here
            return
        if threading.current_thread() is self._thread:  # the collector came by in the very thread that is to end
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            self._closed = True
        self._running.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def pieces(self, work: Work[T]) -> Generator[T]:
        """What the work puts, as it comes, for a caller that may block."""
        outbox: SimpleQueue[Any] = SimpleQueue()
        future = self._submit(work, outbox.put)
        future.add_done_callback(outbox.put)  # after all that was put
        try:
            while (item := outbox.get()) is not future:
                yield item
            _result(future)
        finally:
            future.cancel()

    async def pieces_async(self, work: Work[T]) -> AsyncGenerator[T]:
        """The same for a caller in an event loop, whichever it is."""
        here = asyncio.get_running_loop()
        outbox: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone
                here.call_soon_threadsafe(outbox.put_nowait, item)

        future = self._submit(work, put)
        future.add_done_callback(put)
        try:
            while (item := await outbox.get()) is not future:
                yield item
            _result(future)
        finally:
            future.cancel()

    def _submit(self, work: Work[T], put: Put[Any]) -> Future[None]:
        with self._lock:
            if self._closed:
                raise Closed("it is closed")
            return asyncio.run_coroutine_threadsafe(self._job(work, put), self._loop)

    async def _job(self, work: Work[T], put: Put[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        try:
            await work(put)
        finally:
            self._jobs.discard(task)

    def _run(self, opening: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        try:
            asyncio.run(self._main(opening))
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _main(self, opening: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._running.set()
        opener = asyncio.current_task()
        assert opener is not None
        interrupt = asyncio.create_task(self._interrupt(opener))
        async with opening() as held:
            interrupt.cancel()
            self._opened.set_result(held)
            await self._stop.wait()
            for job in self._jobs:
                job.cancel()
            await asyncio.gather(*self._jobs, return_exceptions=True)

    async def _interrupt(self, opener: "asyncio.Task[Any]") -> None:
        """Closed while it opens: nobody waits for it any more."""
        await self._stop.wait()
        opener.cancel()


def _result(future: Future[None]) -> None:
    if future.cancelled():
        raise Closed("it was closed before this was done")
    future.result()
