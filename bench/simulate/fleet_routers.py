"""A frontend of a simulated fleet: the real placement and the real router, over connections without a wire."""

from typing import Any

from frontend.workers.placement import Placement
from frontend.workers.routing import Router
from shared.messages import Status


class SimulatedConnection:
    """What a placement reads of a connection."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self.status: Status | None = None


class FleetRouter:
    """Chooses workers for the streams of one frontend. clock: the simulated time"""

    def __init__(self, workers: int, clock: Any) -> None:
        self._names = [f"w{index}" for index in range(workers)]
        self._router = Router()
        self._connections: list[Any] = [SimulatedConnection() for _ in range(workers)]
        self._placement = Placement(clock)

    def heard(self, statuses: list[Status]) -> None:
        for connection, status in zip(self._connections, statuses, strict=True):
            connection.status = status

    def choose(self, stream: Any) -> int:
        """Returns the index of the stream's worker."""
        chosen, saved = self._router.choose(
            stream.submit.prompt, stream.submit.cache_salt, self._names, self._placement.loads(self._connections)
        )
        self._placement.put(stream, self._connections[chosen], saved)
        self._connections[chosen].streams[stream.submit.id] = stream
        return chosen

    def ended(self, stream: Any) -> None:
        del self._connections[stream.worker].streams[stream.submit.id]
        self._placement.pop(stream)
