"""How many prompts for vectors or scores are with the workers at the same time; further ones wait here for their turn.

A client that embeds many texts sends many requests at once, each with hundreds of them. Together they are more than a
worker's queue holds, and refused ones would come again and again. They wait here instead, so that the queue of the
workers keeps places for others.
"""

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from frontend.errors import Overloaded

MOST_WAITING = 1 << 22  # limit on the tokens of all requests that wait, which take up to 36 bytes each


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompts that need room. priority: lower values go first, among prompts of one tenant"""

    tenant: str
    prompts: int
    tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    ask: Ask
    turn: "asyncio.Future[None]"  # its result is set when it has room, and it is cancelled with the task that waits


class Room:
    """The prompts of one model that are with its workers, and those that wait. Belongs to one event loop."""

    def __init__(self, places: Callable[[], int]) -> None:
        """places: returns how many prompts the workers can hold; 0: unknown"""
        self._places = places
        self._inside: Counter[str] = Counter()  # prompts with the workers, by tenant
        self._waiting: dict[str, list[_Waiting]] = {}  # by tenant, the one with the next turn first
        self.waiting_tokens = 0

    @asynccontextmanager
    async def taken(self, ask: Ask) -> AsyncGenerator[None]:
        """Waits for room, and holds it during a `with` block. Raises Overloaded if too many tokens wait already."""
        if ask.tenant in self._waiting or not self._fits(ask):
            await self._wait(ask)
        else:
            self._inside[ask.tenant] += ask.prompts
        try:
            yield
        finally:
            self._leave(ask)

    def _fits(self, ask: Ask) -> bool:
        """Half of the places may be one tenant's, and three quarters may be taken. Prompts always fit if alone."""
        places, own = self._places(), self._inside[ask.tenant]
        if not places:
            return True
        mine = not own or own + ask.prompts <= places // 2
        return mine and (not own or self._inside.total() + ask.prompts <= places * 3 // 4)

    async def _wait(self, ask: Ask) -> None:
        if self.waiting_tokens and self.waiting_tokens + ask.tokens > MOST_WAITING:
            raise Overloaded(
                f"texts of {self.waiting_tokens} tokens are waiting, and at most {MOST_WAITING} may wait",
                code="queue_full", retry_after=1.0,
            )  # fmt: skip
        one = _Waiting(ask, asyncio.get_running_loop().create_future())
        insort(self._waiting.setdefault(ask.tenant, []), one, key=lambda other: other.ask.priority)
        self.waiting_tokens += ask.tokens
        try:
            await one.turn
        except asyncio.CancelledError:
            if not one.turn.cancelled():  # it got room just before
                self._leave(ask)
            elif one in self._waiting.get(ask.tenant, ()):
                self._remove(one)
                self._next()
            raise
        finally:
            self.waiting_tokens -= ask.tokens

    def _leave(self, ask: Ask) -> None:
        self._inside[ask.tenant] -= ask.prompts
        if not self._inside[ask.tenant]:
            del self._inside[ask.tenant]
        self._next()

    def _next(self) -> None:
        """Gives room to all that now have it. Tenants take turns."""
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
