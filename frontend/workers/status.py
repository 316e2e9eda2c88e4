"""What /ready, /stats and /metrics know of the workers: each as a `WorkerStatus`, and all of them as one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from shared import messages as m


class Readiness(NamedTuple):
    """Whether requests can be served now and, if not, why: `code` for programs, `text` for people."""

    ready: bool
    code: str  # of the error that requests get: "draining" or "not_ready"; else "ready"
    text: str


READY = Readiness(True, "ready", "ready")
DRAINING = Readiness(False, "draining", "draining")


def not_ready(text: str) -> Readiness:
    return Readiness(False, "not_ready", text)


class ConnectionState(Enum):
    """The state of the connection to one worker. New requests go to READY ones only."""

    CONNECTING = auto()  # the worker has not been heard yet
    LOADING = auto()  # it downloads or loads its model
    HANDSHAKE = auto()  # it is ready, and its Welcome is on the way
    READY = auto()
    STALLED = auto()  # it answers, but its compute loop makes no progress
    LOST = auto()  # it fell silent, or its connection broke
    INCOMPATIBLE = auto()  # it serves something else than this frontend or the other workers
    LEAVING = auto()  # its address is no longer configured; its streams finish
    DRAINING = auto()  # it is shutting down; its streams finish
    FAILED = auto()  # it reported an error from which it cannot recover


REPORTED = {
    m.WorkerState.DOWNLOADING: ConnectionState.LOADING,
    m.WorkerState.LOADING: ConnectionState.LOADING,
    m.WorkerState.DRAINING: ConnectionState.DRAINING,
    m.WorkerState.FAILED: ConnectionState.FAILED,
}
STARTING = (ConnectionState.CONNECTING, ConnectionState.HANDSHAKE)  # may be READY at any moment


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as this frontend sees it now."""

    address: str
    state: ConnectionState
    reason: str  # "ready", or why it is not
    status: m.Status | None = None  # the latest one received
    streams: int = 0  # this frontend's streams that are there now
    load: int = 0  # tokens that these streams may still need
    connected: bool = True  # it answers, so its latest Status still holds

    @property
    def ready(self) -> bool:
        return self.state is ConnectionState.READY


def aggregate(members: Iterable[WorkerStatus]) -> m.Status | None:
    """All workers as if they were one: counts and speeds added up, ages and latencies those of the worst.

    Who it is (pid, epoch, device, ...) is the first one's. What was lost does not count while another is there.
    """
    known = [member for member in members if member.status is not None]
    connected = [member for member in known if member.connected] or known[:1]
    statuses = [member.status for member in connected if member.status is not None]
    if len(statuses) < 2:
        return statuses[0] if statuses else None
    return msgspec.structs.replace(
        statuses[0],
        running=sum(s.running for s in statuses),
        waiting=sum(s.waiting for s in statuses),
        waiting_tokens=sum(s.waiting_tokens for s in statuses),
        pages=_pages([s.pages for s in statuses]),
        prefix_queries=sum(s.prefix_queries for s in statuses),
        prefix_hits=sum(s.prefix_hits for s in statuses),
        draft_tokens=sum(s.draft_tokens for s in statuses),
        accepted_tokens=sum(s.accepted_tokens for s in statuses),
        prompt_tokens_s=sum(s.prompt_tokens_s for s in statuses),
        generation_tokens_s=sum(s.generation_tokens_s for s in statuses),
        last_step_age_s=max(s.last_step_age_s for s in statuses),
        ttft=_worst([s.ttft for s in statuses]),
        itl=_worst([s.itl for s in statuses]),
        e2e=_worst([s.e2e for s in statuses]),
        frontends=_peers(peer for s in statuses for peer in s.frontends),
    )


def _pages(pages: Sequence[m.Pages]) -> m.Pages:
    return m.Pages(
        free=sum(p.free for p in pages),
        cached=sum(p.cached for p in pages),
        owned=sum(p.owned for p in pages),
        total=sum(p.total for p in pages),
    )


def _worst(quantiles: Sequence[m.Quantiles]) -> m.Quantiles:
    return m.Quantiles(max(q.p50 for q in quantiles), max(q.p95 for q in quantiles), max(q.p99 for q in quantiles))


def _peers(peers: Iterable[m.ConnectedFrontend]) -> tuple[m.ConnectedFrontend, ...]:
    """A frontend is known to every worker; its streams are those at all of them."""
    found: dict[str, m.ConnectedFrontend] = {}
    for peer in peers:
        streams = peer.streams + (found[peer.id].streams if peer.id in found else 0)
        found[peer.id] = m.ConnectedFrontend(peer.id, peer.pid, streams)
    return tuple(found.values())
