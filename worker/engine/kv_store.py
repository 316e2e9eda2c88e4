"""Opens the K/V store that --kv-store names, makes its metrics, and hands prompts over to other workers."""

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
from worker.scheduler.sequence import Key, Sequence

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


# Holds prompts that were computed for another worker until the K/V store has their pages.
#
# A prefill worker's request has computed its prompt, and owns no pages any more, when copies of its last pages still
# wait to be written. It ends, and the other worker begins, when they are written; or after MOST_S, as a disk may hang.

MOST_S = 5.0  # the longest wait of a request; the other worker computes again what is missing then


class HandOver:
    """The requests of a prefill worker whose last pages are being written. now: seconds of the loop's clock"""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        # sequence, whether its pages are written, and until when it waits
        self._waiting: dict[Key, tuple[Sequence, Callable[[], bool], float]] = {}

    def begin(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence that has left the scheduler, and all of whose pages were given to the store."""
        self._waiting[sequence.key] = sequence, self._store.flush(), now + MOST_S

    def take(self, now: float) -> list[Sequence]:
        """Returns the sequences that need not wait any longer, and forgets them."""
        if not self._waiting:
            return []
        done = [key for key, (_, written, until) in self._waiting.items() if now >= until or written()]
        return [self._waiting.pop(key)[0] for key in done]

    def remove(self, key: Key) -> Sequence | None:
        """Forgets a sequence and returns it; None if it does not wait."""
        found = self._waiting.pop(key, None)
        return None if found is None else found[0]

    def clear(self) -> list[Sequence]:
        """Forgets all sequences and returns them."""
        found, self._waiting = [sequence for sequence, _, _ in self._waiting.values()], {}
        return found
