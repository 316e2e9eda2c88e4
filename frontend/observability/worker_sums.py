"""What a frontend tells of the workers of each model, from their last statuses, where these have no page of their own.

All frontends of the same workers show the same values: a sum over frontends counts them several times.
"""

from collections.abc import Collection, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.observability.model_metrics import ModelMetrics
from frontend.workers.status import aggregate
from shared.logs.metrics_page import MODEL_LABEL, naming
from shared.messages import Status


class WorkerSums:
    """Queues, K/V pages and prefix cache of each model; sums over its workers, under the names that workers use."""

    def __init__(self, prefix: str, models: Collection[ModelMetrics]) -> None:
        self._prefix, self._models = prefix, models
        self._common = naming(prefix).labels

    def collect(self) -> Iterable[Metric]:
        named = any(model.name for model in self._models)
        labels = [*self._common, *([MODEL_LABEL] if named else [])]
        families: dict[str, Metric] = {
            "num_requests_running": GaugeMetricFamily(
                self._prefix + "num_requests_running", "Sequences running", labels=labels
            ),
            "num_requests_waiting": GaugeMetricFamily(
                self._prefix + "num_requests_waiting", "Sequences waiting", labels=labels
            ),
            "kv_cache_usage_perc": GaugeMetricFamily(
                self._prefix + "kv_cache_usage_perc", "Share of the K/V pages that sequences own, 0 to 1", labels=labels
            ),
            "prefix_cache_queries": CounterMetricFamily(
                self._prefix + "prefix_cache_queries", "Tokens looked up in the prefix cache", labels=labels
            ),
            "prefix_cache_hits": CounterMetricFamily(
                self._prefix + "prefix_cache_hits", "Tokens found in the prefix cache", labels=labels
            ),
        }
        for model in self._models:
            status = aggregate(model.workers)
            own = [*self._common.values(), *([model.name] if named else [])]
            for name, value in _values(status).items() if status else ():
                families[name].add_metric(own, value)  # type: ignore[attr-defined]
        return families.values()


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


def _values(status: Status) -> dict[str, float]:
    usage = max((kind.owned / (kind.total or 1) for kind in status.kv_cache), default=0.0)
    return {
        "num_requests_running": status.running,
        "num_requests_waiting": status.waiting,
        "kv_cache_usage_perc": usage,
        "prefix_cache_queries": status.prefix_queries,
        "prefix_cache_hits": status.prefix_hits,
    }
