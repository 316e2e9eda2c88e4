"""A frontend of a simulated fleet: the real placement and router code, over simulated connections."""

from collections.abc import Callable, Iterable
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
    """Chooses among some workers for one frontend's streams.

    workers: their indices. clock: returns simulated time. homes: home workers per prefix
    """

    def __init__(self, workers: Iterable[int], clock: Callable[[], float], homes: int = HOMES) -> None:
        self.router = Router(homes)
        self._connections: dict[int, Any] = {index: SimulatedConnection(index) for index in workers}
        self._placement = Placement(clock)
        self._set_ready([*self._connections.values()])

    def __len__(self) -> int:
        return len(self._placement)

    def _set_ready(self, ready: list[Any]) -> None:
        self._ready, self._names = ready, [f"w{one.index}" for one in ready]

    def heard(self, statuses: list[Status | None]) -> None:
        """Stores the latest status of each worker. statuses: those of all workers; None for a worker that is down"""
        for index, connection in self._connections.items():
            connection.status = status = statuses[index]
            if status is not None:
                self.router.learn(f"w{index}", status.prefixes)

    def down(self, worker: int) -> None:
        """Records that a worker died. The caller has already removed its streams with `ended`."""
        self.router.forget(f"w{worker}")
        if worker in self._connections:
            self._connections[worker].status = None
        self._set_ready([one for one in self._ready if one.index != worker])

    def up(self, worker: int) -> None:
        if worker in self._connections:
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

    def cached(self, stream: Any) -> int:
        """Returns how many tokens of a prompt one of the workers probably has cached."""
        return self.router.cached(stream.submit.prompt, stream.submit.cache_salt, self._names)

    def _pick(self, stream: Any, loads: list[int]) -> tuple[int, int]:
        return self.router.choose(stream.submit.prompt, stream.submit.cache_salt, self._names, loads)

    def ended(self, stream: Any) -> None:
        del self._connections[stream.worker].streams[stream.submit.id]
        self._placement.pop(stream)
