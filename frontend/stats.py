"""/stats: the workers' latest Statuses as JSON; the same shape, in zeros, before the first one."""

from collections.abc import Sequence
from typing import Any

from frontend.workers import Member, combined
from shared.messages import Pace, Pages, Quantiles, Status

_NONE = Status(epoch=0, pid=0, model="", device="", dtype="", state="absent", progress=0.0)


def stats(members: Sequence[Member], name: str, draining: bool) -> dict[str, Any]:
    """`name` is the served model; `draining` is this frontend's own state, the workers' is added.

    Counts and speeds are sums over the workers, latencies and ages those of the slowest; `worker` is the first.
    """
    s = combined(members) or _NONE
    first = next((member.status for member in members if member.status), _NONE)
    draining = draining or (bool(members) and all(_state(member) == "draining" for member in members))
    return {
        "running": s.running,
        "waiting": s.waiting,
        "waiting_tokens": s.waiting_tokens,
        "pages": _pages(s.pages),
        "prefix": {"queries": s.prefix_queries, "hits": s.prefix_hits},
        "worker": _worker(first, name),
        "workers": [_member(member, name) for member in members],
        "frontends": [{"pid": peer.pid, "id": peer.id, "streams": peer.streams} for peer in s.frontends],
        "throughput": {"prompt": s.prompt_tokens_s, "generation": s.generation_tokens_s},
        "latency": {"ttft": _quantiles(s.ttft), "itl": _quantiles(s.itl), "e2e": _quantiles(s.e2e)},
        "draining": draining,
    }


def _worker(s: Status, name: str) -> dict[str, Any]:
    return {
        "pid": s.pid,
        "epoch": s.epoch,
        "model": s.model or name,
        "device": s.device,
        "dtype": s.dtype,
        "kernels": s.kernels,
        "state": s.state,
        "progress": s.progress,
        "last_step_age_s": s.last_step_age_s,
        "max_seq_len": s.max_seq_len,
        "step": _pace(s.pace),
    }


def _member(member: Member, name: str) -> dict[str, Any]:
    """`streams` and `load` (tokens that they may still need) are this frontend's, the rest is the worker's own."""
    s = member.status or _NONE
    return {
        "address": member.address,
        "ready": member.ready,
        "reason": member.reason,
        "streams": member.streams,
        "load": member.load,
        **_worker(s, name),
        "running": s.running,
        "waiting": s.waiting,
        "pages": _pages(s.pages),
        "throughput": {"prompt": s.prompt_tokens_s, "generation": s.generation_tokens_s},
    }


def _state(member: Member) -> str:
    return member.status.state if member.status else "absent"


def _pages(pages: Pages) -> dict[str, int]:
    return {"free": pages.free, "cached": pages.cached, "owned": pages.owned, "total": pages.total}


def _pace(pace: Pace) -> dict[str, float]:
    return {
        "target_s": pace.target_s,
        "prompt_tokens": pace.prompt_tokens,
        "decodes_s": pace.decodes_s,
        "prompt_token_s": pace.prompt_token_s,
    }


def _quantiles(seconds: Quantiles) -> dict[str, float]:
    return {"p50": seconds.p50, "p95": seconds.p95, "p99": seconds.p99}
