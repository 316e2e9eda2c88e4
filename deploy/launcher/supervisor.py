"""Starts child processes, restarts them, replaces them and stops them.

Knows processes and signals, but not the roles of children: serve.py decides what is started.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from deploy.launcher.child import Backoff, Child, ChildSpec, watch_children
from deploy.launcher.console import Console
from shared.heartbeat import StopRequests

KILLED_S = 5.0  # a killed process ends at once, unless it waits in the system for a disk
PERMANENT_FAILURES = (2, 3)  # exit codes that a restart does not cure: bad settings, an unsupported model


class Supervisor:
    """Keeps children running; `run` returns one exit code for all of them."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        console: Console,
        *,
        stop_timeout: float,
        backoff: Callable[[], Backoff] = Backoff,
        on_exit: Callable[[int], None] = lambda pid: None,
        on_stop: Callable[[], None] = lambda: None,
        start_timeout: float = 60.0,
        ends_process: bool = False,
    ) -> None:
        """Starts no process yet.

        stop_timeout: seconds between SIGTERM and SIGKILL.
        on_exit: called with the pid of every process that ended.
        on_stop: called once when the stop begins.
        start_timeout: seconds within which a successor must serve.
        ends_process: whether the process ends when `run` returns; it then ignores signals to stop.
        """
        self.ready_once = False
        self._console = console
        self._stop_timeout = stop_timeout
        self._start_timeout = start_timeout
        self._on_stop = on_stop
        self._ends_process = ends_process
        self._make: Callable[[ChildSpec], Child] = lambda spec: Child(spec, console, backoff(), on_exit)
        self._children = [self._make(spec) for spec in specs]
        self._tasks: dict[Child, asyncio.Task[int]] = {}  # the tasks of all running children, including draining ones
        self._ended: asyncio.Queue[Child | None] = asyncio.Queue()  # None: a stop was requested
        self._stopping = False
        self._stop_requests = StopRequests()
        self._stop_code = 0
        self._reloading = asyncio.Lock()

    @property
    def children(self) -> tuple[Child, ...]:
        """The children in service, without draining ones."""
        return tuple(self._children)

    @property
    def running(self) -> int:
        """The number of running children, including draining ones."""
        return len(self._tasks)

    def request_stop(self, code: int = 0) -> None:
        """The first call sends SIGTERM to the children and gives them time to drain; the second call kills them.

        A call within a second of the first has no effect (shared/heartbeat.py).

        code: the result of `run` if the server was never ready
        """
        if self._stop_requests.is_second():
            self.kill()
        elif not self._stopping and not self.ready_once:
            self._stop_code = code
        self._stopping = True
        self._ended.put_nowait(None)

    def mark_ready(self) -> None:
        """Records that all children serve."""
        self.ready_once = True
        for child in self._children:
            child.mark_ready()

    async def run(self) -> int:
        reloads: set[asyncio.Task[None]] = set()
        reload = lambda: reloads.add(asyncio.create_task(self.reload()))  # noqa: E731
        with _signal_handlers(self.request_stop, reload, ends_process=self._ends_process):
            for child in self._children:
                self._start(child)
            watching = asyncio.create_task(watch_children(self._tasks))
            failed = await self._until_failure()
            watching.cancel()
            codes = await self._stop()
            if failed:
                self._report_failure(failed)  # last, so that it stays on the screen
            return self._tasks[failed].result() if failed else _combine(codes) or self._stop_code

    async def _until_failure(self) -> Child | None:
        """Returns the first child that failed permanently; None after a stop request."""
        while (ended := await self._ended.get()) is not None:
            if ended in self._children:
                break
            ended.show_held_line()
            del self._tasks[ended]
        return ended

    def start_beside(self, spec: ChildSpec, is_final: Callable[[Child, int], bool]) -> tuple[Child, asyncio.Task[int]]:
        """Starts a child whose end does not end the server. The child ends by `Child.stop`, or when the server ends.

        is_final: returns whether an exit code is final, so that the child is not restarted
        """
        child = self._make(spec)
        if self._stopping:
            child.stop()
        return child, self._start(child, lambda code: is_final(child, code))

    def _start(self, child: Child, is_final: Callable[[int], bool] | None = None) -> asyncio.Task[int]:
        task = asyncio.create_task(child.run(is_final or (lambda code: self._is_final(child, code))))
        task.add_done_callback(lambda _: self._ended.put_nowait(child))
        self._tasks[child] = task
        return task

    def _is_final(self, child: Child, code: int) -> bool:
        """Whether a child that exited with `code` is not restarted.

        True for a replacement that does not serve yet, because the old child still serves, and for a permanent failure
        before the server was ever ready.
        """
        return child not in self._children or (code in PERMANENT_FAILURES and not self.ready_once)

    async def reload(self) -> None:
        """Replaces the children that have successors, one by one; the new child serves before the old one drains."""
        async with self._reloading:
            for index, child in enumerate(self._children):
                if child.spec.successor is not None and not self._stopping:
                    await self._replace(index, child.spec.successor())

    async def _replace(self, index: int, spec: ChildSpec) -> None:
        old, new = self._children[index], self._make(spec)
        self._start(new)
        if not await self._starts_serving(new):
            if not self._stopping:
                self._console.print(f"{spec.name}: its replacement did not start, so the old one stays")
            new.stop()
            new.kill()
            return
        self._children[index] = new
        task = self._tasks[old]
        old.drain()
        _, late = await asyncio.wait([task], timeout=self._stop_timeout)
        if late:
            old.kill()
        elif not self._stopping:
            self._console.print(f"{spec.name} was replaced")

    async def _starts_serving(self, child: Child) -> bool:
        watchdog, task, deadline = child.spec.watchdog, self._tasks[child], time.monotonic() + self._start_timeout
        while not (task.done() or self._stopping or time.monotonic() > deadline):
            if watchdog is None or watchdog.serving:
                return True
            await asyncio.sleep(0.05)
        return False

    def _report_failure(self, child: Child) -> None:
        self._console.clear_progress()
        self._console.print(f"sluice serve: {child.spec.name} cannot start: {child.last_error}", "error")

    async def _stop(self) -> list[int]:
        self._stopping = True
        self._on_stop()
        tasks = dict(self._tasks)
        for child in tasks:
            child.stop()
        _, late = await asyncio.wait(tasks.values(), timeout=self._stop_timeout)
        if late:
            self._console.print(f"sluice: some processes did not end within {self._stop_timeout:g} s, killing them")
            self.kill()
            _, late = await asyncio.wait(late, timeout=KILLED_S)
        for child in [child for child, task in tasks.items() if task in late]:
            self._console.print(
                f"sluice: {child.spec.name} is killed, and the system has not ended it yet, as when a disk hangs: not "
                "waiting for it"
            )
        return [1 if task in late else task.result() for task in tasks.values()]

    def kill(self) -> None:
        """Kills all children without restarting any."""
        for child in self._tasks:
            child.stop()
            child.kill()


def _combine(codes: Sequence[int]) -> int:
    """Returns 0 if every child ended cleanly, else 1. A child that our SIGTERM killed before it had a handler ended
    cleanly."""
    return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1


@contextlib.contextmanager
def _signal_handlers(
    stop: Callable[[int], object], reload: Callable[[], object], *, ends_process: bool
) -> Iterator[None]:
    """Handles SIGTERM, SIGINT and SIGHUP. SIGHUP reloads, or stops if it comes because the terminal was closed.

    ends_process: whether stop signals are ignored afterwards, without a gap, so that a repeated signal cannot prevent
    the process from cleaning up.
    """
    loop, terminal = asyncio.get_running_loop(), sys.stderr.isatty()
    codes = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT}
    before = {
        number: signal.signal(number, lambda *_, code=code: loop.call_soon_threadsafe(stop, code))
        for number, code in codes.items()
    }
    # asyncio's handler for SIGHUP also lets the other signals wake the loop. The other handlers are set without
    # asyncio, because asyncio restores the default action when it removes a handler.
    loop.add_signal_handler(signal.SIGHUP, lambda: stop(0) if terminal and not sys.stderr.isatty() else reload())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends_process else handler)
        loop.remove_signal_handler(signal.SIGHUP)
