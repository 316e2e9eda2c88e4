"""Lets llguidance check in child processes whether a grammar is valid. If a child crashes, only the request with this
grammar fails.

Results are cached, so that a repeated grammar needs no child. There are CHILDREN children, and a tenant uses at most
one at a time, so that slow grammars of one tenant do not make other tenants wait.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from queue import LifoQueue

from frontend.errors import Overloaded
from shared.processes import grammar_trial
from shared.processes.expendable import Expendable, Killed, Lost, NotStarted, Raised, TookTooLong
from shared.processes.fair_queue import FairQueue

CHILDREN = 2
MAX_WAITING = 64  # limit on the waiting requests of one tenant

tenant: ContextVar[str] = ContextVar("tenant", default="")  # the tenant of the request that this task handles
# When all checks of a request must have ended. 0: no deadline yet. Negative: only cached results may be used.
_deadline: ContextVar[float] = ContextVar("_deadline", default=0.0)


class Unknown(Exception):
    """The grammar was not checked before, and the request's turn to check it has not come."""


@lru_cache(maxsize=64)
def error(grammar: str) -> str:
    """Returns why a grammar is not valid; empty if it is valid. Blocks for up to the time limit.

    Raises:
        TookTooLong, Killed: the check failed; not cached, because the next try may succeed.
        Overloaded: the child process could not be started.
        Unknown: `in_turn` called this before the request's turn.
    """
    if (deadline := _deadline.get() or time.monotonic() + grammar_trial.SECONDS) < 0:
        raise Unknown
    with _child() as child:
        try:
            return str(child.call(grammar, seconds=max(1e-3, deadline - time.monotonic())))
        except TookTooLong:
            raise TookTooLong(f"it takes longer than {grammar_trial.SECONDS:g} s to check") from None
        except Killed:
            raise
        except NotStarted as failure:
            raise Overloaded(f"grammars cannot be checked: {failure}", code="not_ready", retry_after=1.0) from failure
        except (Lost, Raised) as failure:
            return str(failure)


async def in_turn(make: Callable[[], str]) -> str:
    """Calls `make`, which calls `error`, in a thread: at once if the results are cached, else when the tenant's turn
    comes. All checks of this call together have the time limit of one check.

    Raises:
        Overloaded: too many requests of the tenant are waiting.
    """
    try:
        return await asyncio.to_thread(_limited, make, -1.0)
    except Unknown:
        pass
    loop, asking = asyncio.get_running_loop(), tenant.get()
    turns = _turns()
    if turns.waiting(asking) >= MAX_WAITING:
        raise Overloaded(f"{MAX_WAITING} grammars wait to be checked", code="queue_full", retry_after=1.0)
    result: asyncio.Future[str] = loop.create_future()

    def start() -> None:
        loop.call_soon_threadsafe(begin)

    def begin() -> None:
        job = asyncio.ensure_future(asyncio.to_thread(_limited, make, time.monotonic() + grammar_trial.SECONDS))
        job.add_done_callback(finish)

    def finish(job: "asyncio.Task[str]") -> None:
        turns.leave(asking)
        if job.cancelled() or result.done():
            result.cancel()
        elif failure := job.exception():
            result.set_exception(failure)
        else:
            result.set_result(job.result())

    turns.enter(asking, start)
    return await result


def _limited(make: Callable[[], str], deadline: float) -> str:
    _deadline.set(deadline)  # changes only this thread's copy of the context
    return make()


@contextmanager
def _child() -> Iterator[Expendable]:
    idle = _children()
    child = idle.get()
    try:
        yield child
    finally:
        idle.put(child)


@cache
def _children() -> LifoQueue[Expendable]:
    idle: LifoQueue[Expendable] = LifoQueue()
    for _ in range(CHILDREN):
        idle.put(Expendable(grammar_trial.ERROR, megabytes=grammar_trial.MEGABYTES))
    return idle


@cache
def _turns() -> FairQueue:
    return FairQueue(CHILDREN)
