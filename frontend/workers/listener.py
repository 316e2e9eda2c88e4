"""The events that a connection reports to its listener, and the counters of all connections for /metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from frontend.workers.stream import Stream
from shared import messages as m

if TYPE_CHECKING:
    from frontend.workers.connection import WorkerConnection


@dataclass(slots=True)
class WireCounters:
    """Events of all connections since the process started."""

    gaps: int = 0  # gaps in the sequence numbers of a worker's frames
    resyncs: int = 0  # streams whose output was requested again
    resumed: int = 0  # streams submitted again after their worker was lost
    moved: int = 0  # resumed streams that went to another worker
    lost: int = 0  # streams that could not be resumed
    garbage: int = 0  # frames that could not be decoded


class ConnectionListener(Protocol):
    """Decides what happens to streams when their connection changes; the pool implements it."""

    def reported(self, connection: "WorkerConnection", status: m.Status) -> None:
        """Called with each Status that arrives."""

    def connected(self, connection: "WorkerConnection") -> None:
        """Called when the worker can be used but has none of `connection.streams`, because it is new
        or has dropped this frontend."""

    def connection_lost(self, connection: "WorkerConnection") -> None:
        """Called when the worker falls silent. It may return with all streams, or under a new epoch with no stream."""

    def stream_rejected(self, connection: "WorkerConnection", stream: Stream, rejected: m.Rejected) -> None:
        """Called when the worker did not admit the stream, which has left the connection."""

    def stream_unknown(self, stream: Stream) -> None:
        """Called when the worker does not know the stream, which has left the connection."""

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        """Called when the stream is complete and has left the connection."""
