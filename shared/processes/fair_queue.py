"""Places for work that takes long, shared fairly between tenants: each has at most one, and they take turns."""

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
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # the tenant whose turn is next comes first

    def waiting(self, tenant: str) -> int:
        """Returns how many pieces of a tenant's work wait."""
        return len(self._waiting.get(tenant, ()))

    def enter(self, tenant: str, start: Callable[[], None]) -> None:
        """Calls `start`, now or later in the thread of a `leave`, when there is a place and the tenant has none."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(start)
        self._start()

    def leave(self, tenant: str) -> None:
        """Ends the work that was started for the tenant."""
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
