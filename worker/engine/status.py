"""Builds the Status of this worker in every phase: downloading, loading, serving, draining or failed."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.config.settings import Settings
from shared.heartbeat import Heartbeat
from shared.messages import KVStoreTier, KVUsage, Role, Status, WorkerState, by_kind
from worker.engine.build import Engine
from worker.engine.metrics import Metrics, Stats
from worker.scheduler.state import SchedulerStatus

if TYPE_CHECKING:  # a feature, which is imported at run time only when needed
    from worker.kv_cache.store import KvStore


@dataclass(slots=True)
class StatusReporter:
    """Builds Status. Threads other than the compute loop's call status(), so a count may be one step old."""

    settings: Settings
    epoch: int
    heartbeat: Heartbeat
    phase: WorkerState = WorkerState.LOADING
    progress: float = 0.0
    draining: bool = False
    engine: Engine | None = None
    stats: Stats = field(default_factory=Stats)
    failed: str = ""
    metrics: Metrics | None = None
    kv_store: "KvStore | None" = None
    wire_totals: Callable[[], dict[str, int]] = dict

    def on_load(self, done: int, total: int) -> None:
        self._progressed(WorkerState.LOADING, done, total)

    def on_download(self, done: int, total: int) -> None:
        self._progressed(WorkerState.DOWNLOADING, done, total)

    def _progressed(self, phase: WorkerState, done: int, total: int) -> None:
        self.heartbeat.progress()
        self.phase, self.progress = phase, done / max(1, total)

    def status(self) -> Status:
        model, engine, role = self.settings.model.name, self.engine, Role(self.settings.worker.role)
        if engine is None:
            device, dtype = self.settings.worker.device, self.settings.worker.dtype
            phase = WorkerState.FAILED if self.failed else self.phase
            return Status(
                self.epoch, os.getpid(), model, device, dtype, phase, self.progress, error=self.failed, role=role
            )
        now, scheduler, stats = time.monotonic(), engine.scheduler.status, self.stats
        speculation = engine.scheduler.speculation
        self._update_totals(scheduler)
        return Status(
            self.epoch,
            os.getpid(),
            model,
            engine.device,
            engine.dtype,
            self._state(),
            max_seq_len=engine.limits.max_seq_len,
            running=scheduler.running,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            expected_tokens=engine.scheduler.state.expected_tokens,
            pages=engine.pools[0].counts(),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prefill_tokens=scheduler.prefill_tokens,
            sampled_tokens=scheduler.generation_tokens,
            steps=stats.steps,
            prompt_tokens_s=stats.prompt.per_second(now),
            generation_tokens_s=stats.generation.per_second(now),
            ttft=stats.ttft.quantiles(),
            itl=stats.itl.quantiles(),
            e2e=stats.e2e.quantiles(),
            error=self.failed,
            kernels=engine.kernels,
            prefill_budget=scheduler.prefill_budget,
            draft_tokens=scheduler.draft_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            kv_cache=_kv_cache(engine),
            prefix_cache_reset=scheduler.prefix_cache_reset,
            batch_invariant=engine.batch_invariant,
            ranks=engine.ranks,
            stages=engine.stages,
            drafted_at=tuple(speculation.drafted_at) if speculation else (),
            accepted_at=tuple(speculation.accepted_at) if speculation else (),
            kv_store=() if self.kv_store is None else tiers_of(self.kv_store),
            role=role,
            page_size=engine.pools[0].page_size,
        )

    def _state(self) -> WorkerState:
        if self.failed:
            return WorkerState.FAILED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    def _update_totals(self, scheduler: SchedulerStatus) -> None:
        """Copies the counters of the scheduler and the server into the metrics."""
        if self.metrics is not None:
            self.metrics.update_totals(
                {
                    "prefix_cache_queries": scheduler.prefix_queries,
                    "prefix_cache_hits": scheduler.prefix_hits,
                    "num_preemptions": scheduler.preemptions,
                    "spec_decode_num_draft_tokens": scheduler.draft_tokens,
                    "spec_decode_num_accepted_tokens": scheduler.accepted_tokens,
                    **self.wire_totals(),
                }
            )


def tiers_of(store: "KvStore") -> tuple[KVStoreTier, ...]:
    """Returns the state of each tier of a K/V store. Any thread may call it."""
    found = []
    for tier in store.tiers:
        counts = tier.counts
        found.append(
            KVStoreTier(
                str(tier.folder), tier.writable, tier.limit, counts.nbytes, counts.hits, counts.misses, counts.tokens,
                counts.read_bytes, counts.read_s, counts.written, counts.written_bytes, counts.written_s,
                counts.evictions, counts.dropped, counts.failures, counts.vanished, **counts.unusable,
            )
        )  # fmt: skip
    return tuple(found)


def _kv_cache(engine: Engine) -> tuple[KVUsage, ...]:
    """Returns the number and bytes of pages and state slots that sequences own, for each kind of page."""
    usages = []
    for pool, group, nbytes in zip(engine.pools, engine.size.groups, engine.size.page_bytes, strict=True):
        pages = pool.counts()
        usages.append(KVUsage(group.name, pages.owned, pages.total, pages.owned * nbytes))
    if engine.slots is not None:
        slots = engine.slots.counts()
        usages.append(KVUsage("state", slots.owned, slots.total, slots.owned * engine.size.state_bytes))
    return by_kind(usages)
