"""/stats: the worker's latest Status as JSON; the same shape, in zeros, before the first one."""

from typing import Any

from shared.messages import Pages, Quantiles, Status

_NONE = Status(epoch=0, pid=0, model="", device="", dtype="", state="absent", progress=0.0)


def stats(status: Status | None, name: str, draining: bool) -> dict[str, Any]:
    """`name` is the served model; `draining` is this frontend's own state, the worker's is added."""
    s = status or _NONE
    return {
        "running": s.running,
        "waiting": s.waiting,
        "waiting_tokens": s.waiting_tokens,
        "pages": _pages(s.pages),
        "prefix": {"queries": s.prefix_queries, "hits": s.prefix_hits},
        "worker": {
            "pid": s.pid,
            "epoch": s.epoch,
            "model": s.model or name,
            "device": s.device,
            "dtype": s.dtype,
            "state": s.state,
            "progress": s.progress,
            "last_step_age_s": s.last_step_age_s,
            "max_seq_len": s.max_seq_len,
        },
        "frontends": [{"pid": peer.pid, "id": peer.id, "streams": peer.streams} for peer in s.frontends],
        "throughput": {"prompt": s.prompt_tokens_s, "generation": s.generation_tokens_s},
        "latency": {"ttft": _quantiles(s.ttft), "itl": _quantiles(s.itl), "e2e": _quantiles(s.e2e)},
        "draining": draining or s.state == "draining",
    }


def _pages(pages: Pages) -> dict[str, int]:
    return {"free": pages.free, "cached": pages.cached, "owned": pages.owned, "total": pages.total}


def _quantiles(seconds: Quantiles) -> dict[str, float]:
    return {"p50": seconds.p50, "p95": seconds.p95, "p99": seconds.p99}
