"""A frontend of a simulated fleet: the real placement and router code, over simulated connections."""

from collections.abc import Callable
from typing import Any

from frontend.workers.pool import Placement
from frontend.workers.routing import HOMES, Router
from shared.messages import Status


class SimulatedConnection:
    """A connection to a worker, with only the attributes that the placement reads."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.streams: dict[int, Any] = {}
        self.status: Status | None = None


class FleetRouter:
    """Chooses workers for one frontend's streams. clock: returns simulated time. homes: home workers per prefix"""

    def __init__(self, workers: int, clock: Callable[[], float], homes: int = HOMES) -> None:
        self.router = Router(homes)
        self._connections: list[Any] = [SimulatedConnection(index) for index in range(workers)]
        self._placement = Placement(clock)
        self._set_ready(self._connections)

    def __len__(self) -> int:
        return len(self._placement)

    def _set_ready(self, ready: list[Any]) -> None:
        self._ready, self._names = ready, [f"w{one.index}" for one in ready]

    def heard(self, statuses: list[Status | None]) -> None:
        """Stores the latest status of each worker; None for a worker that is down."""
        for connection, status in zip(self._connections, statuses, strict=True):
            connection.status = status
            if status is not None:
                self.router.learn(f"w{connection.index}", status.prefixes)

    def down(self, worker: int) -> None:
        """Records that a worker died. The caller has already removed its streams with `ended`."""
        self.router.forget(f"w{worker}")
        self._connections[worker].status = None
        self._set_ready([one for one in self._ready if one.index != worker])

    def up(self, worker: int) -> None:
        ready = [one for one in self._ready if one.index != worker] + [self._connections[worker]]
        self._set_ready(sorted(ready, key=lambda one: one.index))

    def choose(self, stream: Any) -> int | None:
        """Returns the index of the stream's worker; None if no worker is up."""
        if not self._ready:
            return None
        loads = self._placement.loads(self._ready)
        at, saved = self._pick(stream, loads)
        chosen = self._ready[at]
        self._placement.put(stream, chosen, saved)
        chosen.streams[stream.submit.id] = stream
        return int(chosen.index)

    def _pick(self, stream: Any, loads: list[int]) -> tuple[int, int]:
        return self.router.choose(stream.submit.prompt, stream.submit.cache_salt, self._names, loads)

    def ended(self, stream: Any) -> None:
        del self._connections[stream.worker].streams[stream.submit.id]
        self._placement.pop(stream)
