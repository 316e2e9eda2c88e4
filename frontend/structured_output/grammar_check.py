"""Lets llguidance check in child processes whether a grammar is valid. If a child crashes, only the request with this
grammar fails.

Results are cached, so that a repeated grammar needs no child. There are CHILDREN children, and a tenant uses at most
one at a time, so that slow grammars of one tenant do not make other tenants wait. A child whose client has left is
ended.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache

from frontend.errors import Overloaded
from frontend.turns import FairChildren, FairThreads
from shared import grammar_trial
from shared.sandbox import Killed, Lost, NotStarted, Raised, TookTooLong

CHILDREN = 2
CRASHED = "crashed: "  # prefix of the error of a grammar that crashed a child process or made it fail
MAX_WAITING = 64  # limit on the waiting requests of one tenant
THREADS = 3  # threads that look for cached grammars, which takes milliseconds; a tenant uses all but one of them

# When all checks of a request must have ended. 0: no deadline yet. Negative: only cached results may be used.
_deadline: ContextVar[float] = ContextVar("_deadline", default=0.0)


class Unknown(Exception):
    """The grammar was not checked before, and the request's turn to check it has not come."""


@lru_cache(maxsize=64)
def error(grammar: str, compiles: bool = False) -> str:
    """Returns why a grammar is not valid; empty if it is valid. Blocks for up to the time limit.

    compiles: whether to compile it, too, which finds a grammar that allows no text

    Raises:
        TookTooLong, Killed: the check failed; not cached, because the next try may succeed.
        Overloaded: the child process could not be started.
        Unknown: `in_turn` called this before the request's turn.
    """
    try:
        return _answer("compile_error" if compiles else "error", grammar)
    except (TookTooLong, Killed):
        raise
    except (Lost, Raised) as failure:
        return f"{CRASHED}{failure}"


@lru_cache(maxsize=64)
def translated(grammar: str) -> str:
    """Returns a grammar of llama.cpp, or of llguidance, in llguidance's Lark. Blocks for up to the time limit.

    Raises Lost and Raised, which say why it cannot be translated, and what `error` raises.
    """
    return _answer("lark", grammar)


@lru_cache(maxsize=64)
def without_text(grammars: tuple[str, ...]) -> frozenset[int]:
    """Returns the indexes of the grammars that allow no text. Blocks for up to the time limit of one grammar.

    Raises Lost and Raised, and what `error` raises.
    """
    return frozenset(map(int, _answer("without_text", "\0".join(grammars)).split()))


def _answer(what: str, grammar: str) -> str:
    """Returns what `grammar_trial.answer` returns in a child process."""
    if (deadline := _deadline.get() or time.monotonic() + grammar_trial.SECONDS) < 0:
        raise Unknown
    try:
        return str(CHECKS.call_now(what, grammar, seconds=max(1e-3, deadline - time.monotonic())))
    except TookTooLong:
        raise TookTooLong(f"it takes longer than {grammar_trial.SECONDS:g} s to check") from None
    except NotStarted as failure:
        raise Overloaded(f"grammars cannot be checked: {failure}", code="not_ready", retry_after=1.0) from failure


async def in_turn(make: Callable[[], str]) -> str:
    """Calls `make`, which calls `error`, in a thread: at once if the results are cached, else when the tenant's turn
    comes. All checks of this call together have the time limit of one check.

    Raises:
        Overloaded: too many requests of the tenant are waiting.
    """
    try:
        return await CACHED.run(_limited, make, lambda: -1.0)
    except Unknown:
        return await CHECKS.threads.run(_limited, make, lambda: time.monotonic() + grammar_trial.SECONDS)


def _limited(make: Callable[[], str], deadline: Callable[[], float]) -> str:
    _deadline.set(deadline())  # changes only this thread's copy of the context
    return make()


CACHED = FairThreads("grammar-text", THREADS, each=THREADS - 1)
CHECKS = FairChildren(
    "grammar", grammar_trial.ANSWER, CHILDREN, megabytes=grammar_trial.MEGABYTES, most_waiting=MAX_WAITING,
    doing="grammars wait to be checked",
)  # fmt: skip
