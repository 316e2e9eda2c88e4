"""Metrics of the workers of each model, from their latest Statuses, for workers without a metrics page of their own.

All frontends of the same workers show the same values, so a sum over frontends counts each value several times.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.observability.model_metrics import ModelMetrics
from frontend.workers.status import WorkerStatus, aggregate
from shared.logs.metrics_page import MODEL_LABEL, naming
from shared.messages import Status


class Row(NamedTuple):
    """One metric of workers. kind: "gauge" or "counter"; value: computes the metric from the workers' merged Status"""

    name: str
    kind: str
    text: str
    value: Callable[[Status], float]


def cache_share(status: Status) -> float:
    """Returns the share of pages that sequences own, 0 to 1, for the kind of pages with the largest share."""
    return max((kind.owned / (kind.total or 1) for kind in status.kv_cache), default=0.0)


# The metrics under the names that workers themselves use.
OWN: Sequence[Row] = (
    Row("num_requests_running", "gauge", "Sequences running", lambda s: s.running),
    Row("num_requests_waiting", "gauge", "Sequences waiting", lambda s: s.waiting),
    Row("kv_cache_usage_perc", "gauge", "Share of the K/V pages that sequences own, 0 to 1", cache_share),
    Row("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    Row("prefix_cache_hits", "counter", "Tokens found in the prefix cache", lambda s: s.prefix_hits),
)


class WorkerSums:
    """Collects the metrics of `rows`, over all workers of each model.

    labelled: whether the series have labels; False: there is one series for the workers of all models
    """

    def __init__(
        self, prefix: str, models: Collection[ModelMetrics], rows: Collection[Row] = OWN, *, labelled: bool = True
    ) -> None:
        self._prefix, self._models, self._rows, self._labelled = prefix, models, rows, labelled
        self._common = naming(prefix).labels

    def collect(self) -> Iterable[Metric]:
        told = [(labels, status) for labels, workers in self._groups() if (status := aggregate(workers)) is not None]
        for row in self._rows:
            family = Metric(self._prefix + row.name, row.text, row.kind)
            series = family.name + ("_total" if row.kind == "counter" else "")
            for labels, status in told:
                family.add_sample(series, labels, row.value(status))
            yield family

    def _groups(self) -> Iterator[tuple[dict[str, str], Iterable[WorkerStatus]]]:
        """Yields the labels of each series, and the workers that the series is computed from."""
        if not self._labelled:
            yield {}, chain.from_iterable(model.workers for model in self._models)
            return
        for model in self._models:
            yield {**self._common, **({MODEL_LABEL: model.name} if model.name else {})}, model.workers


class LoadedModels:
    """Metrics of models that the launcher loads on demand: loaded, failed, waiting requests, memory."""

    def __init__(self, prefix: str, models: Collection[ModelMetrics]) -> None:
        self._prefix, self._models = prefix, models

    def collect(self) -> Iterable[Metric]:
        label = [MODEL_LABEL]
        loaded = GaugeMetricFamily(self._prefix + "model_loaded", "1 if the model is loaded", labels=label)
        failed = GaugeMetricFamily(self._prefix + "model_failed", "1 if the model's last load failed", labels=label)
        waiting = GaugeMetricFamily(
            self._prefix + "model_load_waiters", "Requests of this frontend that wait for the model", labels=label
        )
        memory = GaugeMetricFamily(
            self._prefix + "model_memory_bytes", "Memory that the model takes of --memory-gb", labels=label
        )
        loads = CounterMetricFamily(self._prefix + "model_load_attempts", "Attempts to load the model", labels=label)
        for model in self._models:
            if (residence := model.residence) is not None:
                state, own = residence.state, [model.name]
                takes_memory = state.state in ("loading", "loaded", "unloading")
                loaded.add_metric(own, state.state in ("loaded", "unloading"))
                failed.add_metric(own, state.state == "failed")
                waiting.add_metric(own, residence.waiters)
                memory.add_metric(own, state.nbytes if takes_memory else 0)
                loads.add_metric(own, state.attempts)
        return [loaded, failed, waiting, memory, loads]
