"""What /ready, /stats and /metrics know of the workers: each as a `WorkerStatus`, and all of them as one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shared import messages as m


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as this frontend sees it now."""

    address: str
    ready: bool
    reason: str  # "ready", or why it is not
    status: m.Status | None = None  # the latest it sent
    streams: int = 0  # of this frontend's, there now
    load: int = 0  # tokens that these may still need
    there: bool = True  # it answers: what it said last still holds


def aggregate(members: Iterable[WorkerStatus]) -> m.Status | None:
    """All workers as if they were one: counts and speeds added up, ages and latencies those of the worst.

    Who it is (pid, epoch, device, ...) is the first one's. What was lost does not count while another is there.
    """
    known = [member for member in members if member.status is not None]
    there = [member for member in known if member.there] or known[:1]
    statuses = [member.status for member in there if member.status is not None]
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
