"""The state of the workers for /ready, /stats and /metrics: a `WorkerStatus` for each worker, or one Status for all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from shared import messages as m


class Readiness(NamedTuple):
    """Whether requests can be served now and, if not, why: `code` for programs, `text` for people."""

    ready: bool
    code: str  # the code of the error that requests get: "draining" or "not_ready"; "ready" if they get no error
    text: str


READY = Readiness(True, "ready", "ready")
DRAINING = Readiness(False, "draining", "draining")


def not_ready(text: str) -> Readiness:
    return Readiness(False, "not_ready", text)


NO_TOKENIZER = not_ready("the tokenizer did not load")


class ConnectionState(Enum):
    """The state of the connection to one worker. Only workers in state READY get new requests."""

    CONNECTING = auto()  # nothing was received from the worker yet
    LOADING = auto()  # the worker downloads or loads its model
    HANDSHAKE = auto()  # the worker is ready, but its Welcome has not arrived
    READY = auto()
    STALLED = auto()  # the worker answers, but its compute loop makes no progress
    LOST = auto()  # the worker fell silent, or its connection broke
    INCOMPATIBLE = auto()  # the worker does not serve what this frontend and the other workers serve
    LEAVING = auto()  # the worker's address is no longer configured; its streams finish
    DRAINING = auto()  # the worker shuts down; its streams finish
    FAILED = auto()  # the worker reported an error from which it cannot recover


REPORTED = {
    m.WorkerState.DOWNLOADING: ConnectionState.LOADING,
    m.WorkerState.LOADING: ConnectionState.LOADING,
    m.WorkerState.DRAINING: ConnectionState.DRAINING,
    m.WorkerState.FAILED: ConnectionState.FAILED,
}
STARTING = (ConnectionState.CONNECTING, ConnectionState.HANDSHAKE)  # states that may become READY at any moment
TEXTS = {
    ConnectionState.CONNECTING: "no worker yet",
    ConnectionState.HANDSHAKE: "greeting the worker",
    ConnectionState.LOST: "worker lost",
    ConnectionState.LEAVING: "leaving",
}


def readiness_of(state: ConnectionState, status: m.Status | None, incompatible: str, step_age: float) -> Readiness:
    """Returns the readiness of one worker.

    status: the worker's latest Status
    incompatible: why the worker cannot be used, if its state is INCOMPATIBLE
    step_age: seconds since the worker's compute loop made progress
    """
    match state:
        case ConnectionState.READY:
            return READY
        case ConnectionState.DRAINING:
            return DRAINING
        case ConnectionState.INCOMPATIBLE:
            return not_ready(incompatible)
        case ConnectionState.STALLED:
            return not_ready(f"stalled: the last step was {step_age:.0f} s ago")
        case ConnectionState.FAILED if status is not None:
            return not_ready(f"the worker failed: {status.error}")
        case ConnectionState.LOADING if status is not None:
            return not_ready(_progress(status))
        case _:
            return not_ready(TEXTS[state])


def _progress(status: m.Status) -> str:
    if status.state is m.WorkerState.DOWNLOADING:
        return f"downloading {status.progress:.0%}"
    return f"loading {status.progress:.0%}" if status.progress < 1 else "loaded, preparing to compute"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as this frontend sees it now."""

    address: str
    state: ConnectionState
    reason: str  # "ready", or why the worker is not ready
    status: m.Status | None = None  # the latest Status received
    streams: int = 0  # this frontend's streams that the worker has now
    load: int = 0  # tokens that these streams may still need
    connected: bool = True  # whether the worker answers, so that its latest Status is still true
    fingerprint: str = ""  # identifies everything that decides the bits of the worker's output; empty while unknown

    @property
    def ready(self) -> bool:
        return self.state is ConnectionState.READY


def aggregate(workers: Iterable[WorkerStatus]) -> m.Status | None:
    """Merges the workers into one Status: counts and rates are added, ages and latencies are the largest ones.

    Other fields (pid, epoch, device, ...) are the first worker's. Lost workers are left out; if all are lost, the
    latest Status of the first one stands for all. None if no worker has sent a Status.
    """
    known = [worker for worker in workers if worker.status is not None]
    connected = [worker for worker in known if worker.connected] or known[:1]
    statuses = [worker.status for worker in connected if worker.status is not None]
    if len(statuses) < 2:
        return statuses[0] if statuses else None
    return msgspec.structs.replace(
        statuses[0],
        running=sum(s.running for s in statuses),
        waiting=sum(s.waiting for s in statuses),
        waiting_tokens=sum(s.waiting_tokens for s in statuses),
        pages=_pages([s.pages for s in statuses]),
        page_size=max(s.page_size for s in statuses),  # a worker that loads does not say it
        kv_cache=m.by_kind(usage for s in statuses for usage in s.kv_cache),
        prefix_queries=sum(s.prefix_queries for s in statuses),
        prefix_hits=sum(s.prefix_hits for s in statuses),
        prefill_tokens=sum(s.prefill_tokens for s in statuses),
        sampled_tokens=sum(s.sampled_tokens for s in statuses),
        steps=sum(s.steps for s in statuses),
        draft_tokens=sum(s.draft_tokens for s in statuses),
        accepted_tokens=sum(s.accepted_tokens for s in statuses),
        drafted_at=_by_position([s.drafted_at for s in statuses]),
        accepted_at=_by_position([s.accepted_at for s in statuses]),
        prompt_tokens_s=sum(s.prompt_tokens_s for s in statuses),
        generation_tokens_s=sum(s.generation_tokens_s for s in statuses),
        last_step_age_s=max(s.last_step_age_s for s in statuses),
        ttft=_worst([s.ttft for s in statuses]),
        itl=_worst([s.itl for s in statuses]),
        e2e=_worst([s.e2e for s in statuses]),
        frontends=_frontends(frontend for s in statuses for frontend in s.frontends),
    )


def _by_position(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _pages(pages: Sequence[m.Pages]) -> m.Pages:
    return m.Pages(
        free=sum(p.free for p in pages),
        cached=sum(p.cached for p in pages),
        owned=sum(p.owned for p in pages),
        total=sum(p.total for p in pages),
    )


def _worst(quantiles: Sequence[m.Quantiles]) -> m.Quantiles:
    return m.Quantiles(max(q.p50 for q in quantiles), max(q.p95 for q in quantiles), max(q.p99 for q in quantiles))


def _frontends(frontends: Iterable[m.ConnectedFrontend]) -> tuple[m.ConnectedFrontend, ...]:
    """Returns each frontend once, with the sum of its streams at all workers."""
    merged: dict[str, m.ConnectedFrontend] = {}
    for frontend in frontends:
        streams = frontend.streams + (merged[frontend.id].streams if frontend.id in merged else 0)
        merged[frontend.id] = m.ConnectedFrontend(frontend.id, frontend.pid, streams)
    return tuple(merged.values())
