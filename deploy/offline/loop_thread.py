"""An event loop in a thread of its own, for callers that have no event loop or run on another one. Knows no requests.

A job is an async function that calls `emit` with items. The caller gets the items, in order, from a generator that
raises what the job raised. Closing the generator cancels the job.

anyio's blocking portal does less: it handles neither forks, nor a close by the garbage collector in the loop's own
thread, nor a Ctrl-C while the loop is still opening its resource.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from importlib import import_module, util
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

R = TypeVar("R")
T = TypeVar("T")
Emit = Callable[[T], None]
Job = Callable[[Emit[T]], Coroutine[Any, Any, None]]


class Closed(Exception):
    """The loop was closed before the job was done."""


class LoopThread(Generic[R]):
    """Opens a resource on its own loop, and keeps it open until `close`."""

    def __init__(self, open_resource: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        """Starts the thread, and returns when the resource is open; raises the error that kept it from opening."""
        self._opened: Future[R] = Future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(open_resource,), name="sluice", daemon=True)
        self._thread.start()
        try:
            self.resource = self._opened.result()
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    def close(self) -> None:
        """Cancels all jobs, closes the resource, ends the thread. Idempotent."""
        if os.getpid() != self._pid:  # this process is a fork, which does not have the thread
            return
        if threading.current_thread() is self._thread:  # called by the garbage collector; a thread cannot join itself
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            self._closed = True
        self._running.wait()
        with contextlib.suppress(RuntimeError):  # raised if the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def iterate(self, job: Job[T]) -> Generator[T]:
        """Yields the items that `job` emits, for a caller that may block."""
        outbox: SimpleQueue[Any] = SimpleQueue()
        future = self._submit(job, outbox.put)
        future.add_done_callback(outbox.put)  # the future comes last, after all items
        try:
            while (item := outbox.get()) is not future:
                yield item
            _result(future)
        finally:
            future.cancel()

    async def iterate_async(self, job: Job[T]) -> AsyncGenerator[T]:
        """Yields the items that `job` emits, for a caller in any event loop."""
        caller_loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Any] = asyncio.Queue()

        def emit(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # raised if the caller's loop has ended
                caller_loop.call_soon_threadsafe(outbox.put_nowait, item)

        future = self._submit(job, emit)
        future.add_done_callback(emit)
        try:
            while (item := await outbox.get()) is not future:
                yield item
            _result(future)
        finally:
            future.cancel()

    def _submit(self, job: Job[T], emit: Emit[Any]) -> Future[None]:
        with self._lock:
            if self._closed:
                raise Closed("the LLM is closed")
            return asyncio.run_coroutine_threadsafe(self._run_job(job, emit), self._loop)

    async def _run_job(self, job: Job[T], emit: Emit[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await job(emit)
        finally:
            self._tasks.discard(task)

    def _run(self, open_resource: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        try:
            asyncio.run(self._main(open_resource))
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)

    async def _main(self, open_resource: Callable[[], AbstractAsyncContextManager[R]]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._running.set()
        opener = asyncio.current_task()
        assert opener is not None
        interrupt = asyncio.create_task(self._cancel_opening(opener))
        async with open_resource() as resource:
            interrupt.cancel()
            self._opened.set_result(resource)
            await self._stop.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cancel_opening(self, opener: "asyncio.Task[Any]") -> None:
        """Cancels `opener` when the loop is closed while the resource still opens."""
        await self._stop.wait()
        opener.cancel()


def _result(future: Future[None]) -> None:
    if future.cancelled():
        raise Closed("the LLM was closed before this request was done")
    future.result()


# Gives a Python caller the pieces of an output's text, in an event loop or without one. Shows the progress bar.

TextPiece = tuple[int, str]  # the index of the request, and the text that its output gained
MAX_WITHOUT_BAR = 8  # with more outputs than this, a terminal shows a progress bar


class TextStream(AsyncGenerator[str]):
    """Pieces of one output's text, as they arrive.

    Awaiting the stream returns the stream itself: `async for text in llm.generate_async(...)` works, and so does
    `stream = await llm.generate_async(...)`.
    """

    def __init__(self, pieces: AsyncGenerator[TextPiece]) -> None:
        self._pieces = pieces

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield

    async def asend(self, value: None) -> str:
        return (await self._pieces.asend(value))[1]

    async def athrow(self, *error: Any) -> str:
        return (await self._pieces.athrow(*error))[1]

    async def aclose(self) -> None:
        await self._pieces.aclose()


def only_text(pieces: Generator[TextPiece]) -> Generator[str]:
    """Yields the texts of pieces that belong to one output."""
    with closing(pieces):
        for _, text in pieces:
            yield text


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each output.

    wanted: whether to show a bar, if tqdm is installed; None: only on a terminal, and only for many outputs
    """
    if wanted is None:
        wanted = total > MAX_WITHOUT_BAR and sys.stderr.isatty()
    if not wanted or util.find_spec("tqdm") is None:
        yield lambda: None
        return
    with import_module("tqdm").tqdm(total=total, unit=" answers", file=sys.stderr) as bar:
        yield bar.update
