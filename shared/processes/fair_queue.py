"""Places for long work, shared fairly between tenants: a tenant has at most `each` places, and tenants take turns."""

import threading
from collections import Counter, deque
from collections.abc import Callable


class FairQueue:
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
        """Takes back an `enter` whose `start` was not called. Says whether it did: otherwise the place is taken."""
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
