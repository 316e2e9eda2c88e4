"""Which worker has which stream, and how many tokens each worker still has to compute.

The load of a worker is kept as a number, which is changed when a stream comes or goes, and counted anew at most every
REFRESH_S. So a choice among many workers with many streams reads one number for each worker.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from frontend.workers.connection import WorkerConnection
from frontend.workers.routing import load
from frontend.workers.stream import Stream

REFRESH_S = 0.25


class Placement:
    """The live streams of a frontend. A stream without a worker waits for one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._homes: dict[Stream, WorkerConnection | None] = {}
        # group (the sequences of one prompt) → the worker of the latest sequence, and how many sequences are live
        self._groups: dict[int, tuple[WorkerConnection, int]] = {}
        self._loads: dict[WorkerConnection, int] = {}
        self._saved: dict[Stream, int] = {}  # stream → tokens of its prompt that the worker may have cached
        self._clock = clock
        self._counted_at = 0.0

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._homes)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._homes

    def home(self, stream: Stream) -> WorkerConnection | None:
        """Returns the worker of a stream; None if it waits, or has ended."""
        return self._homes.get(stream)

    def put(self, stream: Stream, connection: WorkerConnection | None, saved: int = 0) -> None:
        """Gives a stream to a worker, or lets it wait. saved: tokens of its prompt that the worker may have cached"""
        self._leave(stream)
        self._homes[stream] = connection
        if saved:
            self._saved[stream] = saved
        if connection is None:
            return
        if connection in self._loads:
            self._loads[connection] += load([stream], None, self._saved)
        if group := stream.submit.group:
            _, members = self._groups.get(group, (connection, 0))
            self._groups[group] = connection, members + 1

    def pop(self, stream: Stream) -> WorkerConnection | None:
        """Forgets a stream. Returns its worker; None if the stream waited for a worker."""
        self._leave(stream)
        return self._homes.pop(stream, None)

    def clear(self) -> None:
        for stream in list(self._homes):
            self.pop(stream)

    def group_home(self, group: int) -> WorkerConnection | None:
        """Returns the worker that the latest sequence of a prompt went to; None if no sequence of it is live."""
        found = self._groups.get(group)
        return found[0] if found else None

    def loads(self, connections: Sequence[WorkerConnection]) -> list[int]:
        """Returns the load of each of these workers, in tokens; see routing.load."""
        now = self._clock()
        if now - self._counted_at > REFRESH_S or not self._loads.keys() >= set(connections):
            self._counted_at = now
            self._loads = {one: load(one.streams.values(), one.status, self._saved) for one in connections}
        return [self._loads[one] for one in connections]

    def _leave(self, stream: Stream) -> None:
        """Removes a stream from the load of its worker and from its group."""
        home, group = self._homes.get(stream), stream.submit.group
        if home is None:
            return
        if home in self._loads:
            self._loads[home] = max(0, self._loads[home] - load([stream], None, self._saved))
        self._saved.pop(stream, None)
        if group and group in self._groups:
            last, members = self._groups.pop(group)
            if members > 1:
                self._groups[group] = last, members - 1
