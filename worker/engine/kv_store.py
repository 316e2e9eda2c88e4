"""Opens the K/V store that --kv-store names, and makes its metrics."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.config.worker import WorkerConfig
from worker.engine.build import Engine
from worker.engine.status import tiers_of
from worker.kv_cache.sizing import GIB
from worker.kv_cache.store import KvStore
from worker.kv_cache.store_file import KINDS, Disk
from worker.kv_cache.store_pages import StoredPages
from worker.kv_cache.store_tier import Tier, check_folder
from worker.scheduler.fetching import Fetching

log = logging.getLogger("sluice.kv_store")


def open_store(worker: WorkerConfig, engine: Engine, wake: Callable[[], None], *, block: int = 0) -> KvStore | None:
    """Opens the store, and has the scheduler use it. Returns None if the model keeps no K/V.

    wake: wakes the compute loop; block: pages of a file, 0: as many as BLOCK_TOKENS need

    Raises ConfigError for a folder that other users can write to.
    """
    if engine.scheduler.state.paging.prefix is None:
        log.warning("--kv-store has no effect: this model keeps no K/V")
        return None
    pages = StoredPages(engine.runner.cache, engine.fingerprint, block)
    tiers = []
    for name, limit in worker.kv_tiers:
        folder = Path(name).expanduser().absolute()
        check_folder(folder)
        tiers.append(Tier(folder, int(limit * GIB), pages.space, Disk()))
    store = KvStore(pages, tiers, always=worker.kv_store_fetch == "always", wake=wake)
    engine.scheduler.use_store(store)
    return store


class StoreCollector:
    """Makes the metrics of the store at each scrape. The label `tier` is the number of the folder, from 0 on."""

    def __init__(self, prefix: str, store: KvStore, fetching: Fetching) -> None:
        self._prefix, self._store, self._fetching = prefix + "kv_store_", store, fetching

    def collect(self) -> Iterator[Metric]:
        tiers = tiers_of(self._store)
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=["tier"])
            for index, tier in enumerate(tiers):
                counter.add_metric([str(index)], getattr(tier, field))
            yield counter
        unusable = CounterMetricFamily(
            self._prefix + "unusable", "Files that were not used, by what was wrong.", labels=["tier", "kind"]
        )
        for index, tier in enumerate(tiers):
            for kind in (*KINDS, "vanished"):
                unusable.add_metric([str(index), kind], getattr(tier, kind))
        yield unusable
        sizes = GaugeMetricFamily(self._prefix + "bytes", "Bytes of all files, as of the last look.", labels=["tier"])
        for index, tier in enumerate(tiers):
            sizes.add_metric([str(index)], tier.bytes)
        yield sizes
        yield GaugeMetricFamily(
            self._prefix + "fetching", "Sequences that wait for the store.", value=self._fetching.waiting
        )
        yield CounterMetricFamily(
            self._prefix + "hit_tokens", "Tokens that came from the store and were not computed.",
            value=self._fetching.hits,
        )  # fmt: skip
        yield CounterMetricFamily(
            self._prefix + "failed", "Prefixes of which not all came that was found.", value=self._fetching.failed
        )
        yield CounterMetricFamily(
            self._prefix + "refused", "Prefixes that were computed because that is faster.", value=self._store.refused
        )


COUNTERS = {
    "hits": ("hits", "Files that were read and used."),
    "misses": ("misses", "Prefixes of which no tier had more; at the last tier."),
    "read_bytes": ("read_bytes", "Bytes of the files that were read."),
    "read_seconds": ("read_s", "Seconds in which files were read."),
    "writes": ("written", "Files that were written."),
    "written_bytes": ("written_bytes", "Bytes of the files that were written."),
    "write_seconds": ("written_s", "Seconds in which files were written."),
    "evictions": ("evictions", "Files that were removed to make room."),
    "dropped": ("dropped", "Files that were not written: the folder failed, hung or did not keep up."),
    "failures": ("failures", "Operations that the system refused."),
}
