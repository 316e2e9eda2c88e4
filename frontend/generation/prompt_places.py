"""Where prompts of requests for vectors or scores wait until the workers have places for them.

A client that embeds many texts sends many requests at once, each with hundreds of them. Together they are more than a
worker's queue holds, and refused ones would come again and again. They wait here instead, so that the queue of the
workers keeps places for others.
"""

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from frontend.errors import Overloaded

MOST_WAITING = 1 << 23  # limit on the tokens of all requests that wait to begin, which take up to 36 bytes each
FEW = 8  # so many prompts of a request do not wait behind requests with more


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompts that need places.

    tokens: of all prompts that the request still has
    priority: lower values go first, among prompts of one tenant
    begun: whether the workers had other prompts of the request before
    """

    tenant: str
    prompts: int
    tokens: int
    priority: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    ask: Ask
    turn: "asyncio.Future[None]"  # its result is set when it has places, and it is cancelled with the task that waits


class PromptPlaces:
    """The prompts of one model that are with its workers, and those that wait. Belongs to one event loop."""

    def __init__(self, places: Callable[[], int]) -> None:
        """places: returns how many prompts the workers can hold; 0: unknown"""
        self._places = places
        self._inside = Counter[str]()  # prompts with the workers, by tenant
        self._computing = Counter[str]()  # windows that the workers have admitted, by tenant
        self._waiting: dict[str, list[_Waiting]] = {}  # by tenant, the one with the next turn first
        self._waiting_tokens = Counter[str]()

    @asynccontextmanager
    async def taken(self, ask: Ask) -> AsyncGenerator[None]:
        """Waits for places, and holds them during a `with` block. Raises Overloaded if too many tokens wait already."""
        if not self._fits(ask) or (ask.tenant in self._waiting and ask.prompts > FEW):
            await self._wait(ask)
        else:
            self._inside[ask.tenant] += ask.prompts
        try:
            yield
        finally:
            self._leave(ask)

    @contextmanager
    def computing(self, tenant: str) -> Iterator[None]:
        """Counts prompts as admitted by the workers during a `with` block."""
        self._computing[tenant] += 1
        try:
            yield
        finally:
            self._computing[tenant] -= 1
            if not self._computing[tenant]:
                del self._computing[tenant]

    def is_computing(self, tenant: str) -> bool:
        """Whether the workers compute prompts of a tenant, so that there will be places in their queue."""
        return tenant in self._computing

    def _fits(self, ask: Ask) -> bool:
        """Half of the places may be one tenant's, and three quarters may be taken. Prompts always fit if alone.

        A few prompts may have all three quarters, so that a question need not wait for a client that embeds many texts.
        """
        places, own = self._places(), self._inside[ask.tenant]
        if not places or not own:
            return True
        most = places * 3 // 4
        mine = own + ask.prompts <= (most if ask.prompts <= FEW else places // 2)
        return mine and self._inside.total() + ask.prompts <= most

    async def _wait(self, ask: Ask) -> None:
        own, most = self._waiting_tokens[ask.tenant], MOST_WAITING // 2
        if (
            not ask.begun
            and own
            and (own + ask.tokens > most or self._waiting_tokens.total() + ask.tokens > MOST_WAITING)
        ):
            raise Overloaded(
                f"texts of {own} tokens are waiting, and at most {most} of one key may wait", code="queue_full",
                retry_after=1.0,
            )  # fmt: skip
        one = _Waiting(ask, asyncio.get_running_loop().create_future())
        insort(self._waiting.setdefault(ask.tenant, []), one, key=lambda other: other.ask.priority)
        self._waiting_tokens[ask.tenant] += ask.tokens
        try:
            await one.turn
        except asyncio.CancelledError:
            if not one.turn.cancelled():  # it got its places just before
                self._leave(ask)
            elif one in self._waiting.get(ask.tenant, ()):
                self._remove(one)
                self._next()
            raise
        finally:
            self._waiting_tokens[ask.tenant] -= ask.tokens
            if not self._waiting_tokens[ask.tenant]:
                del self._waiting_tokens[ask.tenant]

    def _leave(self, ask: Ask) -> None:
        self._inside[ask.tenant] -= ask.prompts
        if not self._inside[ask.tenant]:
            del self._inside[ask.tenant]
        self._next()

    def _next(self) -> None:
        """Gives places to all that fit now. Tenants take turns."""
        while ready := next((queue[0] for queue in self._waiting.values() if self._fits(queue[0].ask)), None):
            self._remove(ready)
            if ready.turn.cancelled():  # its task has not run since
                continue
            if queue := self._waiting.pop(ready.ask.tenant, None):
                self._waiting[ready.ask.tenant] = queue  # behind the other tenants
            self._inside[ready.ask.tenant] += ready.ask.prompts
            ready.turn.set_result(None)

    def _remove(self, one: _Waiting) -> None:
        queue = self._waiting[one.ask.tenant]
        queue.remove(one)
        if not queue:
            del self._waiting[one.ask.tenant]
