"""Long work off the event loop, shared fairly between tenants. Knows no HTTP and no kind of work.

Each kind of work has its own `FairThreads` or `FairChildren`, so that one kind never waits for another. Within a kind,
tenants take turns, and no tenant can have all places. Work ends with its client: if the task that awaits it is
cancelled, waiting work is dropped, and a child process that works is ended. A thread cannot be ended, so its place
stays taken until it returns; what may take long therefore belongs into a child.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import cached_property
from queue import LifoQueue
from typing import Any, TypeVar

from frontend.errors import Overloaded
from shared.sandbox import Killed, Sandbox, SlowTenants, TurnQueue

T = TypeVar("T")

# Whose share the present request uses: the name of its key, behind a gateway with the fairness id; without keys the
# address of the client.
tenant: ContextVar[str] = ContextVar("tenant", default="")


class FairThreads:
    """Threads for one kind of work. Event loops and threads may share them."""

    def __init__(
        self, name: str, places: int, *, each: int = 1, most_waiting: int | None = None, doing: str = ""
    ) -> None:
        """
        places: how many threads there are
        each: how many of them one tenant may use at the same time
        most_waiting: how many pieces of one tenant's work may wait; None: any number
        doing: what waits, for the error: "images wait to be decoded"
        """
        self.most_waiting = most_waiting
        self._name, self._places, self._doing = name, places, doing
        self._turns = TurnQueue(places, each)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of `function`, called in a thread when the present tenant has its turn.

        Raises Overloaded if too many pieces of the tenant's work wait, and whatever `function` raises.
        """
        name, loop, job = tenant.get(), asyncio.get_running_loop(), Job()
        if not self._turns.enter_now(name):
            await self._wait(name, loop)
        context = copy_context()
        context.run(_job.set, job)
        try:
            running = self._threads.submit(context.run, function, *arguments)
        except BaseException:  # the threads were closed
            self._turns.leave(name)
            raise
        running.add_done_callback(lambda _: self._turns.leave(name))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            job.stop()
            raise

    async def _wait(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for the tenant's turn."""
        if self.most_waiting is not None and self._turns.waiting(name) >= self.most_waiting:
            raise Overloaded(f"{self.most_waiting} {self._doing}", code="queue_full", retry_after=1.0)
        turn: asyncio.Future[None] = loop.create_future()

        def start() -> None:
            try:
                loop.call_soon_threadsafe(_resolve, turn)
            except RuntimeError:  # the event loop of this work was closed
                self._turns.leave(name)

        self._turns.enter(name, start)
        try:
            await turn
        except asyncio.CancelledError:
            if not self._turns.withdraw(name, start):
                self._turns.leave(name)
            raise

    def close(self) -> None:
        """Ends the threads when they have done their work."""
        self._threads.shutdown()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._places, thread_name_prefix=self._name)


class FairChildren:
    """Child processes for one function that may crash, hang or take all memory."""

    def __init__(
        self, name: str, function: str, places: int, *, megabytes: int, each: int = 1, most_waiting: int, doing: str
    ) -> None:
        """function, megabytes: see Sandbox. The other arguments are those of FairThreads."""
        self.threads = FairThreads(name, places, each=each, most_waiting=most_waiting, doing=doing)
        self._slow = SlowTenants()
        self._idle: LifoQueue[Sandbox] = LifoQueue()
        self._slow_idle: LifoQueue[Sandbox] = LifoQueue()  # for slow tenants; a process starts with its first call
        for _ in range(places):
            self._idle.put(Sandbox(function, megabytes=megabytes))
            self._slow_idle.put(Sandbox(function, megabytes=megabytes, slow=True))

    async def call(self, *arguments: Any, seconds: float) -> Any:
        """Returns the function's result, when the present tenant has had its turn.

        seconds: time limit of the call itself

        Raises Overloaded if too many calls of the tenant wait, and what Sandbox.call raises.
        """
        return await self.threads.run(self._call, arguments, seconds)

    def _call(self, arguments: tuple[Any, ...], seconds: float) -> Any:
        return self.call_now(*arguments, seconds=seconds)

    def call_now(self, *arguments: Any, seconds: float) -> Any:
        """Like `call`, but blocks, and without turns. A function that runs in `threads` calls it."""
        name, job = tenant.get(), _job.get()
        idle = self._slow_idle if name in self._slow else self._idle
        child = idle.get()
        try:
            with nullcontext() if job is None else job.using(child):
                try:
                    return child.call(*arguments, seconds=seconds)
                finally:
                    self._slow.note(name, child.took)
        finally:
            if not child.pid:  # this call has ended it; the next one, perhaps another tenant's, need not wait
                child.prepare()
            idle.put(child)

    def idle(self) -> list[Sandbox]:
        """Returns the children that do not work now."""
        return [*self._idle.queue, *self._slow_idle.queue]


class Job:
    """A piece of work in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Sandbox | None = None
        self._stopped = False

    @contextmanager
    def using(self, child: Sandbox) -> Iterator[None]:
        """Lets `stop` end this child during a `with` block. Raises Killed if the work was stopped before."""
        with self._lock:
            if self._stopped:
                raise Killed("the client has left")
            self._child = child
        try:
            yield
        finally:
            with self._lock:
                self._child = None

    def stop(self) -> None:
        """Ends the child process that the work uses now, and lets it use no other."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()


_job: ContextVar[Job | None] = ContextVar("_job", default=None)  # the job that this thread works on


def _resolve(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
