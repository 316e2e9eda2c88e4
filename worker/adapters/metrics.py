"""The metrics of adapters: which of them run, and which wait. The gauge has vLLM's name, because gateways read it."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker.adapters.store import AdapterStore
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Sequence


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
        for name, count in self._store.requests.copy().items():
            requests.add_metric([name], count)
        loaded = GaugeMetricFamily(self._prefix + "lora_adapters_loaded", "Adapters in memory.", value=len(self._store))
        yield from (info, requests, loaded)


def _names(sequences: Iterable[Sequence]) -> str:
    used = [sequence.adapter for sequence in sequences]
    return ",".join(sorted({use.adapter.name for use in used if use is not None}))
