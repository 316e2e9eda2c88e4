"""Keeps adapters in memory, and reads them in a thread, so that steps continue meanwhile.

To make room for a new adapter, the least recently used adapter that no sequence uses is dropped. A later request for a
dropped adapter reads it from its folder again. If all are in use, requests for other adapters wait, in order of arrival
(worker/structured_output/pending.py). For each adapter that waits, the least recently used one in memory gets no
further requests, so that it is free when its running requests have ended.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.config.settings import ModelConfig
from shared.lora import AdapterError, AdapterFiles, path_problem, read_files
from shared.messages import Adapter
from worker.lora.loaded import LoadedAdapter, load_adapter
from worker.lora.target_modules import Sites, sites_of
from worker.models.decoder import Weights
from worker.models.sharding import Part
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Sequence, used_by
from worker.spec import ModelSpec

log = logging.getLogger("sluice.adapters")
MAX_COUNTED, OTHERS = 100, "(others)"  # the maximum number of names in the metrics, and the label for all other names


class OtherRanks(Protocol):
    """The other processes that compute the model together with this one. They keep their parts of each adapter."""

    @property
    def part(self) -> Part:
        """The part of the model that this process has."""

    def give(self, number: int, files: AdapterFiles) -> None: ...
    def forget(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """An adapter in memory, or one that is being read. number: see LoadedAdapter"""

    number: int
    loaded: Future[LoadedAdapter]

    @property
    def failed(self) -> bool:
        return self.loaded.done() and self.loaded.exception() is not None


class AdapterStore:
    """The adapters in memory.

    most: the maximum number of adapters; max_rank: the maximum rank; wake: called in a thread after each read
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        weights: Weights,
        model: ModelConfig,
        *,
        most: int,
        max_rank: int,
        ranks: OtherRanks | None = None,
    ) -> None:
        """spec: of the whole model. weights: those of this process. ranks: None if this process has the whole model"""
        self.wake: Callable[[], None] = lambda: None
        self.most = most
        self._folder, self._spec, self._weights, self._model, self._max_rank = folder, spec, weights, model, max_rank
        self._ranks, self._numbers = ranks, count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self.requests: dict[str, int] = {}  # adapter name → number of sequences that came with the adapter
        self._kept: OrderedDict[Adapter, Kept] = OrderedDict()  # the most recently used is last

    def __len__(self) -> int:
        return len(self._kept)

    def load(
        self, adapter: Adapter, live: Callable[[], Collection[Sequence]], behind: int = 0
    ) -> "Future[LoadedAdapter] | None":
        """Returns a future of the adapter, whose result() raises AdapterError. Returns None if there is no room yet.

        live: returns the live sequences, whose adapters must not be dropped
        behind: how many other adapters wait for room before this one
        """
        adapter = adapter.unscaled
        kept = self._kept.get(adapter)
        if kept is not None and not kept.failed:
            if adapter in islice(self._kept, behind):  # it makes room for one that waits
                return None
            self._kept.move_to_end(adapter)
            return kept.loaded
        self._kept.pop(adapter, None)
        if behind or not self._evict_unused(live):
            return None
        number = next(self._numbers)
        future = self._threads.submit(self._read, adapter, number)
        self._kept[adapter] = Kept(number, future)
        future.add_done_callback(lambda _: self.wake())
        return future

    def count(self, name: str) -> None:
        """Counts a sequence that came with the adapter of this name."""
        own = name if name in self.requests or len(self.requests) < MAX_COUNTED else OTHERS
        self.requests[own] = self.requests.get(own, 0) + 1

    def _evict_unused(self, live: Callable[[], Collection[Sequence]]) -> bool:
        """Drops an adapter if there are too many. Returns False if all are in use."""
        if len(self._kept) < self.most:
            return True
        used = used_by(live())
        oldest = next((adapter for adapter in self._kept if adapter not in used), None)
        if oldest is None:
            return False
        dropped = self._kept.pop(oldest)
        if self._ranks is not None:
            self._threads.submit(self._ranks.forget, dropped.number)  # in the thread, and so after it was given
        return True

    def _read(self, adapter: Adapter, number: int) -> LoadedAdapter:
        try:
            if problem := path_problem(adapter.path, self._model):
                raise AdapterError(f"{adapter.path} {problem}")
            files = read_files(adapter.path)
            if files.sha256 != adapter.sha256:
                raise AdapterError(f"the files in {adapter.path} have changed since it was loaded")
            loaded = self._load(files, number)
        except AdapterError as error:
            raise AdapterError(f"`model`: the adapter {adapter.name!r} cannot be used: {error}") from None
        log.info("adapter %s: %s", adapter.name, adapter.path)
        return replace(loaded, number=number)

    def _load(self, files: AdapterFiles, number: int) -> LoadedAdapter:
        embed = self._weights.embed
        if self._ranks is None:
            return load_adapter(files, self._sites, embed.dtype, embed.device, self._max_rank)
        self._ranks.give(number, files)  # the other ranks pack their parts at the same time as this one
        try:
            return load_adapter(files, self._sites, embed.dtype, embed.device, self._max_rank)
        except BaseException:
            self._ranks.forget(number)
            raise

    @cached_property
    def _sites(self) -> Sites:
        part = None if self._ranks is None else self._ranks.part
        return sites_of(self._folder, self._spec, self._weights, part)

    def close(self) -> None:
        """Cancels reads that have not begun. Does not wait for a read that has begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# The metrics of adapters: which of them run, and which wait. The gauge has vLLM's name, because gateways read it.


class AdapterCollector:
    """Makes the metrics at each scrape."""

    def __init__(self, prefix: str, store: AdapterStore, scheduler: Scheduler) -> None:
        self._prefix, self._store, self._scheduler = prefix, store, scheduler

    def collect(self) -> Iterator[Metric]:
        state = self._scheduler.state
        running = set(list(state.running))  # list() copies atomically what the compute loop may change
        waiting = [sequence for sequence in list(state.live.values()) if sequence not in running]
        info = GaugeMetricFamily(
            self._prefix + "lora_requests_info",
            "When it was scraped (seconds since 1970); the labels name the adapters of running and waiting sequences.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        info.add_metric([str(self._scheduler.config.max_loras), _names(running), _names(waiting)], time.time())
        requests = CounterMetricFamily(
            self._prefix + "lora_requests", "Sequences that came with an adapter.", labels=["lora_name"]
        )
        for name, number in self._store.requests.copy().items():
            requests.add_metric([name], number)
        loaded = GaugeMetricFamily(self._prefix + "lora_adapters_loaded", "Adapters in memory.", value=len(self._store))
        yield from (info, requests, loaded)


def _names(sequences: Iterable[Sequence]) -> str:
    used = [sequence.adapter for sequence in sequences]
    return ",".join(sorted({use.adapter.name for use in used if use is not None}))
