"""Asks llguidance in child processes whether a grammar is valid. A grammar that crashes a child ends only its own
request.

The verdict on a grammar is remembered, so that a repeated grammar needs no child. There are CHILDREN children, and a
tenant occupies one at a time: slow grammars of one tenant do not make the others wait.
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
MAX_WAITING = 64  # requests of one tenant that may wait

tenant: ContextVar[str] = ContextVar("tenant", default="")  # the tenant of the request that this task handles
# When all checks of a request must have ended. 0: only grammars that were checked before have a verdict.
_deadline: ContextVar[float] = ContextVar("_deadline", default=0.0)


class Unknown(Exception):
    """The grammar was not checked yet, and it is not this request's turn."""


@lru_cache(maxsize=64)
def error(grammar: str) -> str:
    """Returns why a grammar is not valid; empty if it is. Blocks for up to the time limit.

    Raises:
        TookTooLong, Killed: not remembered, as the next try may succeed.
        Overloaded: the machine could not start a child.
        Unknown: within `in_turn`, before the turn.
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
    """Calls a function that calls `error`, in a thread: at once if its grammars are known, else when it is the turn of
    the tenant. All checks of the call together may take as long as one check.

    Raises:
        Overloaded: the tenant has too many such requests waiting.
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
