"""The response of /stats: the workers' latest Statuses as JSON; before the first one the same fields with zeros."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from frontend.workers.status import ConnectionState, WorkerStatus, aggregate
from shared.messages import Status, WorkerState

_NONE = Status(epoch=0, pid=0, model="", device="", dtype="", state=WorkerState.LOADING, progress=0.0)  # of no worker


def stats(workers: Sequence[WorkerStatus], name: str, draining: bool) -> dict[str, Any]:
    """Counts and rates are sums over the workers, latencies and ages those of the slowest; `worker` is the first one.

    name: the served model
    draining: of this frontend; the result is also true when all workers drain
    """
    s = aggregate(workers) or _NONE
    first = next((worker.status for worker in workers if worker.status), _NONE)
    draining = draining or (bool(workers) and all(worker.state is ConnectionState.DRAINING for worker in workers))
    return {
        "running": s.running,
        "waiting": s.waiting,
        "waiting_tokens": s.waiting_tokens,
        "pages": asdict(s.pages),
        "prefix": {"queries": s.prefix_queries, "hits": s.prefix_hits},
        "speculation": {"drafted": s.draft_tokens, "accepted": s.accepted_tokens},
        "worker": _worker(first, name),
        "workers": [_one_worker(worker, name) for worker in workers],
        "frontends": [{"pid": peer.pid, "id": peer.id, "streams": peer.streams} for peer in s.frontends],
        "throughput": {"prompt": s.prompt_tokens_s, "generation": s.generation_tokens_s},
        "latency": {"ttft": asdict(s.ttft), "itl": asdict(s.itl), "e2e": asdict(s.e2e)},
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
        "state": "absent" if s is _NONE else s.state,
        "progress": s.progress,
        "last_step_age_s": s.last_step_age_s,
        "max_seq_len": s.max_seq_len,
        "step": asdict(s.pace),
    }


def _one_worker(worker: WorkerStatus, name: str) -> dict[str, Any]:
    """`streams` and `load` (tokens that they may still need) are this frontend's, the rest is the worker's report."""
    s = worker.status or _NONE
    return {
        "address": worker.address,
        "ready": worker.ready,
        "reason": worker.reason,
        "streams": worker.streams,
        "load": worker.load,
        **_worker(s, name),
        "running": s.running,
        "waiting": s.waiting,
        "pages": asdict(s.pages),
        "throughput": {"prompt": s.prompt_tokens_s, "generation": s.generation_tokens_s},
    }
