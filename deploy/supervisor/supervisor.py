"""Children and their fate: kept, looked after, replaced, stopped. Knows processes and signals, and nothing of what
they are for; who starts what is launch.py's.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from deploy.supervisor.child_process import Backoff, Child, ChildSpec, watch_children
from deploy.supervisor.console import Console

CANNOT_SERVE = (2, 3)  # exit codes that will not get better: bad settings, a model that cannot be served


class Supervisor:
    """Children and their fate. `run` returns the exit code of the whole."""

    def __init__(
        self,
        roles: Sequence[ChildSpec],
        console: Console,
        *,
        stop_timeout: float,
        backoff: Callable[[], Backoff] = Backoff,
        gone: Callable[[int], None] = lambda pid: None,
        on_stop: Callable[[], None] = lambda: None,
        start_timeout: float = 60.0,
    ) -> None:
        """`start_timeout`: how long a successor may take until it serves."""
        self.ready_once = False
        self._console = console
        self._stop_timeout = stop_timeout
        self._start_timeout = start_timeout
        self._on_stop = on_stop
        self._make: Callable[[ChildSpec], Child] = lambda role: Child(role, console, backoff(), gone)
        self._children = [self._make(role) for role in roles]
        self._tasks: dict[Child, asyncio.Task[int]] = {}  # of every child that lives, those that leave too
        self._ends: asyncio.Queue[Child | None] = asyncio.Queue()  # who ended; None: we are asked to
        self._stopping = False
        self._reloading = asyncio.Lock()

    def ask_to_stop(self) -> None:
        """First call: children get SIGTERM and their time; second: they are killed."""
        if self._stopping:
            self._kill()
        self._stopping = True
        self._ends.put_nowait(None)

    def served(self) -> None:
        """Every child does its work."""
        self.ready_once = True
        for child in self._children:
            child.served()

    async def run(self) -> int:
        reloads: set[asyncio.Task[None]] = set()
        again = lambda: reloads.add(asyncio.create_task(self.reload()))  # noqa: E731
        with _signals(self.ask_to_stop, again):
            for child in self._children:
                self._keep(child)
            guarding = asyncio.create_task(watch_children(self._tasks))
            failed = await self._until_failure()
            guarding.cancel()
            codes = await self._stop()
            if failed:
                self._explain(failed)  # last, so that it is what stays on the screen
            return self._tasks[failed].result() if failed else _verdict(codes)

    async def _until_failure(self) -> Child | None:
        """The first child that cannot be had; None when we are asked to stop."""
        while (ended := await self._ends.get()) is not None:
            if ended in self._children:
                break
            del self._tasks[ended]
        return ended

    def _keep(self, child: Child) -> None:
        task = asyncio.create_task(child.keep(lambda code: self._final(child, code)))
        task.add_done_callback(lambda _: self._ends.put_nowait(child))
        self._tasks[child] = task

    def _final(self, child: Child, code: int) -> bool:
        """A successor has one try: who is there already serves on."""
        return child not in self._children or (code in CANNOT_SERVE and not self.ready_once)

    async def reload(self) -> None:
        """Replaces, one after another, the children that can be: the next is there before the last one leaves."""
        async with self._reloading:
            for index, child in enumerate(self._children):
                if child.role.successor is not None and not self._stopping:
                    await self._replace(index, child.role.successor())

    async def _replace(self, index: int, role: ChildSpec) -> None:
        old, new = self._children[index], self._make(role)
        self._keep(new)
        if not await self._serves(new):
            if not self._stopping:
                self._console.say(f"{role.name}: the next one does not come up, so the old one stays")
            new.stop()
            new.kill()
            return
        self._children[index] = new
        task = self._tasks[old]
        old.leave()
        _, late = await asyncio.wait([task], timeout=self._stop_timeout)
        if late:
            old.kill()
        elif not self._stopping:
            self._console.say(f"{role.name} was replaced")

    async def _serves(self, child: Child) -> bool:
        watch, task, deadline = child.role.watch, self._tasks[child], time.monotonic() + self._start_timeout
        while not (task.done() or self._stopping or time.monotonic() > deadline):
            if watch is None or watch.serving:
                return True
            await asyncio.sleep(0.05)
        return False

    def _explain(self, child: Child) -> None:
        self._console.done()
        said = child.last_line.partition(": ")  # "sluice worker: it cannot because"
        self._console.say(f"sluice serve: {child.role.name} cannot start: {said[2] or said[0]}")

    async def _stop(self) -> list[int]:
        self._stopping = True
        self._on_stop()
        tasks = dict(self._tasks)
        for child in tasks:
            child.stop()
        _, late = await asyncio.wait(tasks.values(), timeout=self._stop_timeout)
        if late:
            self._console.say(f"sluice: not all processes ended in {self._stop_timeout:g} s, killing them")
            self._kill()
        return list(await asyncio.gather(*tasks.values()))

    def _kill(self) -> None:
        for child in self._tasks:
            child.stop()
            child.kill()


def _verdict(codes: Sequence[int]) -> int:
    """0 when every child ended well; one that had no handler yet and died of our SIGTERM did."""
    return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1


@contextlib.contextmanager
def _signals(stop: Callable[[], object], again: Callable[[], object]) -> Iterator[None]:
    """SIGHUP is `again`, but `stop` when it comes because our terminal is gone."""
    loop, terminal = asyncio.get_running_loop(), sys.stderr.isatty()
    handlers = {
        signal.SIGTERM: stop,
        signal.SIGINT: stop,
        signal.SIGHUP: lambda: stop() if terminal and not sys.stderr.isatty() else again(),
    }
    for signum, handler in handlers.items():
        loop.add_signal_handler(signum, handler)
    try:
        yield
    finally:
        for signum in handlers:
            loop.remove_signal_handler(signum)
