"""Places for long work, shared fairly between tenants: a tenant has at most one place, and tenants take turns."""

import threading
from collections import deque
from collections.abc import Callable


class FairQueue:
    """Starts each piece of work when its tenant has its turn. Threads may share the queue."""

    def __init__(self, places: int) -> None:
        """places: how many tenants' work may run at the same time"""
        self._free = places
        self._lock = threading.Lock()
        self._running: set[str] = set()
        # waiting work by tenant, the tenant with the next turn first
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def waiting(self, tenant: str) -> int:
        """Returns the number of waiting pieces of the tenant's work."""
        return len(self._waiting.get(tenant, ()))

    def enter(self, tenant: str, start: Callable[[], None]) -> None:
        """Calls `start` when a place is free and the tenant has none: now, or later in a thread that calls `leave`."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(start)
        self._start()

    def leave(self, tenant: str) -> None:
        """Frees the tenant's place, whose work has ended, and starts the next work."""
        with self._lock:
            self._running.discard(tenant)
            self._free += 1
        self._start()

    def _start(self) -> None:
        while (start := self._next()) is not None:
            start()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            tenant = next((one for one in self._waiting if one not in self._running), None)
            if tenant is None or not self._free:
                return None
            queue = self._waiting.pop(tenant)
            start = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            self._running.add(tenant)
            self._free -= 1
            return start
