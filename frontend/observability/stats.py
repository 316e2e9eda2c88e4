"""/stats: what the workers last reported, as one document; zeros before the first report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.workers.status import ConnectionState, WorkerStatus, aggregate
from shared import messages as m
from shared.messages import Status, WorkerState

Count = Annotated[int, Meta(ge=0)]
Fingerprint = Callable[[str], str]  # a worker's fingerprint → the fingerprint of answers that it computes

# stands for the Status of a worker that has not reported
_NONE = Status(epoch=0, pid=0, model="", device="", dtype="", state=WorkerState.LOADING, progress=0.0)
_ABSENT = WorkerStatus("", ConnectionState.CONNECTING, "")


class Pages(msgspec.Struct, kw_only=True):
    free: Count
    cached: Count
    owned: Count
    total: Count


class KVUsage(msgspec.Struct, kw_only=True):
    """The K/V pages of one kind of layer. owned: pages that sequences hold; bytes: memory of the owned pages."""

    owned: Count = 0
    total: Count = 0
    bytes: Count = 0


class KVCacheStats(msgspec.Struct, kw_only=True):
    """Pages by kind of layer: layers keep all positions of a sequence, a sliding window, or a recurrent state."""

    full: KVUsage
    window: KVUsage
    state: KVUsage


class PrefixCacheStats(msgspec.Struct, kw_only=True):
    """How many tokens were looked up in the prefix cache, and how many of them were found."""

    queries: Count
    hits: Count


class SpeculationStats(msgspec.Struct, kw_only=True):
    """Numbers of draft tokens."""

    drafted: Count
    accepted: Count
    drafted_at: list[Count]  # by place after the last token: first drafts, second drafts, ...
    accepted_at: list[Count]


class StepBudget(msgspec.Struct, kw_only=True):
    """How a step that decodes is planned: its target duration, and what was measured."""

    target_s: float
    prompt_tokens: Count
    prompt_token_s: float
    decodes_s: float


class Throughput(msgspec.Struct, kw_only=True):
    """Tokens a second over the last ten seconds."""

    prompt: float
    generation: float


class Quantiles(msgspec.Struct, kw_only=True):
    """Latencies in seconds."""

    p50: float
    p95: float
    p99: float


class Latency(msgspec.Struct, kw_only=True):
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles


class Rank(msgspec.Struct, kw_only=True):
    """One of the processes that compute a model together. stage: the pipeline stage of the process, from 0 on."""

    rank: Count
    pid: Count
    stage: Count


class Worker(msgspec.Struct, kw_only=True):
    pid: Count
    epoch: Count
    model: str
    device: str
    dtype: str
    kernels: str
    batch_invariant: bool | None
    state: str
    progress: float
    last_step_age_s: float
    max_seq_len: Count
    fingerprint: str
    step: StepBudget
    ranks: list[Rank]


class KVStoreTier(msgspec.Struct, kw_only=True):
    """A folder of --kv-store, and what the worker has done there since its start. The order is that of the flag.

    hits: files that were read; misses: prefixes of which no tier had more, counted at the last; unusable: files that
    were not used, by what was wrong with them
    """

    usable: bool
    limit: Count
    bytes: Count
    hits: Count
    misses: Count
    tokens: Count
    read_bytes: Count
    read_s: float
    written: Count
    written_bytes: Count
    written_s: float
    evictions: Count
    dropped: Count
    failures: Count
    unusable: dict[str, Count]


class PoolWorker(Worker, kw_only=True):
    """A worker as this frontend sees it. `streams` and `load` (the tokens that these streams may still need) count only
    this frontend's streams; the worker reports the other fields itself."""

    address: str
    ready: bool
    reason: str
    streams: Count
    load: Count
    role: str
    running: Count
    waiting: Count
    pages: Pages
    kv_cache: KVCacheStats
    throughput: Throughput
    kv_store: list[KVStoreTier]


class Frontend(msgspec.Struct, kw_only=True):
    pid: Count
    id: str
    streams: Count


class BatchesWaiting(msgspec.Struct, kw_only=True):
    """What waits in the batches of the server's store: batches that have not ended, and their lines.

    stored_bytes: what the key that asks has in the store: files, batches, conversations and kept answers
    max_stored_bytes: how many they may have; 0: there is no limit
    """

    batches: Count = 0
    lines_waiting: Count = 0
    lines_running: Count = 0
    stored_bytes: Count = 0
    max_stored_bytes: Count = 0


class Stats(msgspec.Struct, kw_only=True):
    """Counts and speeds are sums over the workers, latencies are the slowest worker's; `worker` is the first worker.

    `fingerprint` is empty if no worker is ready, or if the fingerprints of the ready workers differ."""

    running: Count
    waiting: Count
    waiting_tokens: Count
    pages: Pages
    kv_cache: KVCacheStats
    prefix: PrefixCacheStats
    speculation: SpeculationStats
    worker: Worker
    workers: list[PoolWorker]
    frontends: list[Frontend]
    throughput: Throughput
    latency: Latency
    draining: bool
    fingerprint: str
    batches: BatchesWaiting


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one model. name: the name that the model is served under"""

    workers: Sequence[WorkerStatus]
    name: str
    fingerprint: Fingerprint = str


def stats(pools: Sequence[Pool], draining: bool, batches: BatchesWaiting | None = None) -> Stats:
    """Builds the document from one pool for each model. `draining`: whether this frontend is draining."""
    members = [(pool, worker) for pool in pools for worker in pool.workers]
    workers = [worker for _, worker in members]
    total = aggregate(workers) or _NONE
    first_pool, first = next((member for member in members if member[1].status), (pools[0], _ABSENT))
    draining = draining or (bool(workers) and all(worker.state is ConnectionState.DRAINING for worker in workers))
    return Stats(
        running=total.running,
        waiting=total.waiting,
        waiting_tokens=total.waiting_tokens,
        pages=_pages(total),
        kv_cache=_kv_cache(total),
        prefix=PrefixCacheStats(queries=total.prefix_queries, hits=total.prefix_hits),
        speculation=_speculation(total),
        worker=Worker(**_worker(first, first_pool)),
        workers=[_pool_worker(worker, pool) for pool, worker in members],
        frontends=[Frontend(pid=one.pid, id=one.id, streams=one.streams) for one in total.frontends],
        throughput=_throughput(total),
        latency=msgspec.convert(total, Latency, from_attributes=True),
        draining=draining,
        fingerprint=_common([pool.fingerprint(worker.fingerprint) for pool, worker in members if worker.ready]),
        batches=batches or BatchesWaiting(),
    )


def _common(fingerprints: Sequence[str]) -> str:
    """Returns the common fingerprint; empty if the fingerprints differ."""
    return fingerprints[0] if len(set(fingerprints)) == 1 else ""


def _worker(worker: WorkerStatus, pool: Pool) -> dict[str, Any]:
    status = worker.status or _NONE
    return {
        "pid": status.pid,
        "epoch": status.epoch,
        "model": status.model or pool.name,
        "device": status.device,
        "dtype": status.dtype,
        "kernels": status.kernels,
        "batch_invariant": status.batch_invariant,
        "state": "absent" if status is _NONE else status.state,
        "progress": status.progress,
        "last_step_age_s": status.last_step_age_s,
        "max_seq_len": status.max_seq_len,
        "fingerprint": pool.fingerprint(worker.fingerprint),
        "step": msgspec.convert(status.prefill_budget, StepBudget, from_attributes=True),
        "ranks": _ranks(status),
    }


def _ranks(status: Status) -> list[Rank]:
    tp_size = max(1, len(status.ranks) // status.stages)
    return [Rank(rank=rank, pid=pid, stage=rank // tp_size) for rank, pid in enumerate(status.ranks)]


def _pool_worker(worker: WorkerStatus, pool: Pool) -> PoolWorker:
    status = worker.status or _NONE
    return PoolWorker(
        **_worker(worker, pool),
        address=worker.address,
        ready=worker.ready,
        reason=worker.reason,
        streams=worker.streams,
        load=worker.load,
        role=status.role.value,
        running=status.running,
        waiting=status.waiting,
        pages=_pages(status),
        kv_cache=_kv_cache(status),
        throughput=_throughput(status),
        kv_store=[_tier(tier) for tier in status.kv_store],
    )


def _tier(tier: m.KVStoreTier) -> KVStoreTier:
    unusable = {"torn": tier.torn, "foreign": tier.foreign, "corrupted": tier.corrupted, "vanished": tier.vanished}
    return msgspec.convert({**msgspec.structs.asdict(tier), "unusable": unusable}, KVStoreTier)


def _pages(status: Status) -> Pages:
    return msgspec.convert(status.pages, Pages, from_attributes=True)


def _kv_cache(status: Status) -> KVCacheStats:
    kinds = {one.kind: KVUsage(owned=one.owned, total=one.total, bytes=one.bytes) for one in status.kv_cache}
    none = KVUsage()
    return KVCacheStats(full=kinds.get("full", none), window=kinds.get("window", none), state=kinds.get("state", none))


def _speculation(status: Status) -> SpeculationStats:
    return SpeculationStats(
        drafted=status.draft_tokens, accepted=status.accepted_tokens, drafted_at=list(status.drafted_at),
        accepted_at=list(status.accepted_at),
    )  # fmt: skip


def _throughput(status: Status) -> Throughput:
    return Throughput(prompt=status.prompt_tokens_s, generation=status.generation_tokens_s)
