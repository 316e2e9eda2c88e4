"""Runs work that may crash, hang or take all memory in a child process, whose death costs only one call.

An `Sandbox` keeps one child that runs one function, call after call, and starts another after the child has ended.
The parent enforces the time limit, and lowers the priority of a child whose call takes long; such a child ends after
its call, since its priority stays low. Tenants whose calls took long get children that have a low priority from their
start. Resource limits of the child bound its memory and stack. Arguments and results
are msgpack, in frames of a 4-byte length and a body, over a pair of sockets. The child imports only the function's
module.
"""

import atexit
import importlib
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import msgspec

START_S = 60.0  # the time in which a new child must import its function
YIELD_S = 0.25  # a call that takes longer goes on with a lower priority
NICENESS = 5  # how much lower: beside a busy thread it gets a quarter of a core
SLOW_NICENESS = 10  # of a slow tenant's children: beside a busy thread they get a tenth of a core
SLOW_S = 20.0  # for so long after its call a tenant counts as slow
STACK_KIB = 2048  # the stack of the thread that runs the function
KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")
CHILD = "from shared.sandbox import main; main()"


class Lost(Exception):
    """The call did not return, because its child has ended. The message begins with "it", which means the input."""


class TookTooLong(Lost):
    """The call exceeded its time limit. On a machine with less load it might have finished."""


class Killed(Lost):
    """Something else ended the child; the input is probably not the cause."""


class Raised(Exception):
    """The function raised an exception in the child; the message is the exception's type and text. The child lives."""


class NotStarted(Exception):
    """No child process could be started; the message says why."""


class Sandbox:
    """One function in a child process. Threads may share it: calls run one by one. The child ends with this object."""

    def __init__(self, function: str, *, megabytes: int, stack_kib: int = STACK_KIB, slow: bool = False) -> None:
        """
        function: `module:name`
        megabytes: memory (MiB) that calls may take in addition to the child's memory after its imports
        stack_kib: the stack of the thread that runs the function, in KiB
        slow: whether the child always has a lower priority
        """
        self._arguments = (function, str(megabytes), str(stack_kib))
        self._slow = slow
        self._megabytes = megabytes
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.took = 0.0  # seconds of the latest call, without the start of its child

    @property
    def pid(self) -> int:
        """The child's process id; 0 while there is none."""
        child = self._child
        return child.process.pid if child else 0

    def call(self, *arguments: Any, seconds: float) -> Any:
        """Returns the function's result. Blocks until a call of another thread has ended, however long it takes.

        seconds: time limit of this call, without the start of a child

        Raises:
            Lost: the call ended its child, or took too long.
            Raised: the function raised an exception.
            NotStarted: no child could be started.
        """
        with self._lock:
            self.took = 0.0
            if self._child is not None and self._child.has_left():  # it ended between calls, so no call is to blame
                self._child.end()
                self._child = None
            child = self._child = self._child or _Child(self._arguments, self._slow)
            began = math.inf
            try:
                child.wait_until_started()
                began = time.monotonic()
                succeeded, is_last, result = child.ask(arguments, seconds)
                is_last = is_last or (child.yields and not self._slow)
            except (OSError, EOFError) as error:
                self._child = None
                raise self._lost(child.end(), error, seconds) from None
            except BaseException:
                self._child = None
                child.end()
                raise
            finally:
                self.took = max(0.0, time.monotonic() - began)
            if is_last:
                self._child = None
                child.end()
        if not succeeded:
            raise Raised(result)
        return result

    def _lost(self, code: int, error: Exception, seconds: float) -> Lost:
        if isinstance(error, TimeoutError):
            return TookTooLong(f"it takes longer than {seconds:.1f} s")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return Lost("it is nested, or its references are chained, too deeply")
        if code == -signal.SIGABRT:
            return Lost(f"it takes more than {self._megabytes} MB of memory")
        return Killed(f"the process that examined it ended ({code})")

    def prepare(self) -> None:
        """Starts a child if there is none, so that the next call need not wait for its start. Does not wait for it."""
        with self._lock, suppress(NotStarted):
            self._child = self._child or _Child(self._arguments, self._slow)

    def kill(self) -> None:
        """Ends the child at once, and thereby a call of another thread, which raises Killed."""
        if (child := self._child) is not None:
            child.process.kill()

    def close(self) -> None:
        """Ends the child. A later call starts another."""
        with self._lock:
            child, self._child = self._child, None
            if child:
                child.end()


class _Child:
    """The parent's end of one child."""

    def __init__(self, arguments: tuple[str, ...], slow: bool) -> None:
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "MALLOC_ARENA_MAX": "1",
        }
        self._has_started = False
        self.yields = False  # whether the child has a lower priority than others, which it then keeps
        self._socket, theirs = socket.socketpair()
        try:  # the child's output is dropped: a library may print a client's text
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, *arguments],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._socket.close()
            raise NotStarted(f"no child process could be started: {error}") from error
        finally:
            theirs.close()
        self._finish = weakref.finalize(self, _finish, self.process, self._socket)
        if slow:
            self._yield(SLOW_NICENESS)

    def wait_until_started(self) -> None:
        """Waits until the child has imported its function. Raises NotStarted if the child cannot import it."""
        if self._has_started:
            return
        try:
            self._has_started = _receive(self._socket, time.monotonic() + START_S)
        except (OSError, EOFError) as error:
            raise NotStarted(f"no child process could be started: {error}") from error

    def ask(self, arguments: tuple[Any, ...], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        _send(self._socket, (seconds, arguments))
        if not self.yields:
            with suppress(TimeoutError):
                self._socket.settimeout(min(seconds, YIELD_S))
                self._socket.recv(1, socket.MSG_PEEK)
                return _receive(self._socket, deadline)
            self._yield()
        return _receive(self._socket, deadline)

    def _yield(self, niceness: int = NICENESS) -> None:
        """Lowers the priority of the child's threads, so that long calls take less time from streams.

        Where Linux groups processes by session to schedule them, the priority of the group counts, too.
        """
        self.yields = True
        with suppress(OSError), open(f"/proc/{self.process.pid}/autogroup", "w") as file:
            file.write(str(niceness))
        with suppress(OSError):  # the child has ended, or a thread of it
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0) + niceness)

    def end(self) -> int:
        """Ends the child if it runs; returns its exit code, negative if a signal had ended the child before."""
        with suppress(subprocess.TimeoutExpired):  # a child's connection ends shortly before the child does
            if self.has_left():
                self.process.wait(1.0)
        self._finish()
        return int(self.process.returncode)

    def has_left(self) -> bool:
        """Whether the child has closed its end of the connection. Valid only while no result is expected."""
        self._socket.settimeout(0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _finish(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _send(connection: socket.socket, value: Any) -> None:
    body = msgspec.msgpack.encode(value)
    connection.sendall(len(body).to_bytes(4, "big") + body)


def _receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Returns the value of the next frame. Raises TimeoutError past the deadline, EOFError if the other side ended."""
    size = int.from_bytes(_read(connection, 4, deadline), "big")
    return msgspec.msgpack.decode(_read(connection, size, deadline))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the connection has ended")
        data += piece
    return bytes(data)


# The rest of this file runs in the child process.


def main() -> None:
    """The child: reads calls from standard input, a socket, until the parent closes it."""
    name, megabytes, stack_kib = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # a service manager signals all processes, but a draining parent needs its child
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.stack_size(int(stack_kib) << 10)
    serving = threading.Thread(target=_serve, args=(name, int(megabytes)))
    serving.start()
    serving.join()


def _serve(name: str, megabytes: int) -> None:
    connection = socket.socket(fileno=0)
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    limit = _address_space() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _send(connection, True)
    while True:
        try:
            seconds, arguments = _receive(connection)
        except (OSError, EOFError):
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)  # ends a child whose parent has died
        try:
            succeeded, result = True, function(*arguments)
        except MemoryError:
            os.abort()
        except BaseException as error:  # a panic in Rust is no Exception
            succeeded, result = False, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # A child whose memory is still more than half used after a call ends, and the parent starts another.
        is_last = _address_space() > limit - (megabytes << 19)
        _send(connection, (succeeded, is_last, result))
        if is_last:
            return


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


# Places for long work, shared fairly between tenants: a tenant has at most `each` places, and tenants take turns.


class SlowTenants:
    """The tenants whose latest work took long. Their next work gets a low priority from its start, or is left out, so
    that a client that sends one long piece after another does not slow down others. Threads may share it."""

    def __init__(self, long_s: float = YIELD_S) -> None:
        """long_s: seconds of a long piece of work"""
        self._long_s = long_s
        self._until: dict[str, float] = {}  # tenant → when it no longer counts as slow

    def note(self, tenant: str, seconds: float) -> None:
        """Notes how long a piece of the tenant's work took, in seconds."""
        if seconds < self._long_s:
            return
        now = time.monotonic()
        self._until = {one: until for one, until in [*self._until.items()] if until > now and one != tenant}
        self._until[tenant] = now + SLOW_S

    def __contains__(self, tenant: str) -> bool:
        return self._until.get(tenant, 0.0) > time.monotonic()


class TurnQueue:
    """Starts each piece of work when its tenant has its turn. Threads may share the queue."""

    def __init__(self, places: int, each: int = 1) -> None:
        """
        places: how many pieces of work may run at the same time
        each: how many of them may be of one tenant
        """
        self._free, self._each = places, each
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        # waiting work by tenant, the tenant with the next turn first
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def waiting(self, tenant: str) -> int:
        """Returns the number of waiting pieces of the tenant's work."""
        return len(self._waiting.get(tenant, ()))

    def enter_now(self, tenant: str) -> bool:
        """Takes a place, which `leave` frees, if one is free and the tenant may have it. Returns whether it did."""
        with self._lock:
            if not self._free or self._running[tenant] >= self._each:
                return False
            self._take(tenant)
            return True

    def enter(self, tenant: str, start: Callable[[], None]) -> None:
        """Calls `start` when the tenant may have a place: now, or later in a thread that calls `leave`."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(start)
        self._start()

    def withdraw(self, tenant: str, start: Callable[[], None]) -> bool:
        """Takes back an `enter` before its `start`. Returns False if the place was given already."""
        with self._lock:
            queue = self._waiting.get(tenant, deque())
            if start not in queue:
                return False
            queue.remove(start)
            if not queue:
                del self._waiting[tenant]
            return True

    def leave(self, tenant: str) -> None:
        """Frees one of the tenant's places, whose work has ended, and starts the next work."""
        with self._lock:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._free += 1
        self._start()

    def _start(self) -> None:
        while (start := self._next()) is not None:
            start()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            tenant = next((one for one in self._waiting if self._running[one] < self._each), None)
            if tenant is None or not self._free:
                return None
            queue = self._waiting.pop(tenant)
            start = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            self._take(tenant)
            return start

    def _take(self, tenant: str) -> None:
        self._running[tenant] += 1
        self._free -= 1


# Ends Python code of the main thread that computes for too long, where a child process would cost too much.
#
# The limit is on the thread's processor time, so a busy or suspended machine ends nothing. It is noticed between two
# operations of Python: one long operation (a product of large numbers) is not interrupted.

LEAST_LOOK_S = 1e-3  # between two looks at the thread's time


class CpuLimit:
    """A context manager in which an error is raised after one to two times so many seconds. Only in the main thread.

    It can be entered again and again, but not while it is entered. It is the only user of SIGALRM in its process.
    Entering it takes no call of the system, but once in `seconds`: the alarm stays set, and most alarms find nothing.
    """

    def __init__(self, seconds: float, error: Callable[[], Exception]) -> None:
        self._seconds, self._error = seconds, error
        self._main = threading.main_thread().ident
        self._inside = self._is_set = self._listens = False
        self._entered = 0  # how often
        self._seen = (0, 0.0)  # `_entered`, and the thread's time, when an alarm first found this block

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._entered += 1
            self._inside = True
            if not self._is_set:
                if not self._listens:
                    signal.signal(signal.SIGALRM, self._look)
                    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0.0)  # Python takes its handlers away first
                self._listens = self._is_set = True
                signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() == self._main:
            self._inside = False

    def _look(self, number: int, frame: FrameType | None) -> None:
        self._is_set = False
        if not self._inside:
            return
        now = time.thread_time()
        if self._seen[0] != self._entered:
            self._seen = self._entered, now
        left = self._seen[1] + self._seconds - now
        if left <= 0:
            raise self._error()
        self._is_set = True
        signal.setitimer(signal.ITIMER_REAL, max(LEAST_LOOK_S, left))
