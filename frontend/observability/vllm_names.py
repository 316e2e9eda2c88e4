"""Repeats a frontend's metrics under vLLM's names, for dashboards, autoscalers and gateways written for vLLM.

vLLM has all metrics on one page, so this page repeats the workers' metrics, too, from their last statuses. All
frontends of the same workers show the same values there: a sum over frontends counts them several times.
"""

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.observability.model_metrics import ModelMetrics
from frontend.workers.status import aggregate
from shared.logs.metrics_page import MODEL_LABEL, Collector, naming
from shared.messages import Status

VLLM = "vllm:"
SAME = (
    "prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds",
)  # fmt: skip


class VllmNames:
    """Passes on the families of `source`, and adds vLLM's.

    source: has the frontend's own metrics
    prefix: of their names
    """

    def __init__(self, source: Collector, prefix: str, models: Collection[ModelMetrics]) -> None:
        self._source = source
        self._prefix = prefix
        self._models = models
        self._naming = naming(VLLM)

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            yield family
            name = family.name.removeprefix(self._prefix)
            if name in SAME:
                yield self._renamed(family, name)
        yield from self._of_workers()

    def _renamed(self, family: Metric, name: str) -> Metric:
        """Returns the family under vLLM's name. Reasons that vLLM does not know are counted as `stop`."""
        renamed = Metric(VLLM + name, family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = {**self._naming.labels, **sample.labels}
            if "finished_reason" in labels:
                labels["finished_reason"] = self._naming.reason(labels["finished_reason"])
            series = VLLM + sample.name.removeprefix(self._prefix), tuple(labels.items())
            sums[series] = sums.get(series, 0.0) + sample.value
        for (series_name, pairs), value in sums.items():
            renamed.add_sample(series_name, dict(pairs), value)
        return renamed

    def _of_workers(self) -> Iterable[Metric]:
        named = any(model.name for model in self._models)
        labels = [*self._naming.labels, *([MODEL_LABEL] if named else [])]
        families: dict[str, Metric] = {
            "num_requests_running": GaugeMetricFamily(
                VLLM + "num_requests_running", "Sequences running", labels=labels
            ),
            "num_requests_waiting": GaugeMetricFamily(
                VLLM + "num_requests_waiting", "Sequences waiting", labels=labels
            ),
            "kv_cache_usage_perc": GaugeMetricFamily(
                VLLM + "kv_cache_usage_perc", "Share of the K/V pages that sequences own, 0 to 1", labels=labels
            ),
            "prefix_cache_queries": CounterMetricFamily(
                VLLM + "prefix_cache_queries", "Tokens looked up in the prefix cache", labels=labels
            ),
            "prefix_cache_hits": CounterMetricFamily(
                VLLM + "prefix_cache_hits", "Tokens found in the prefix cache", labels=labels
            ),
        }
        for model in self._models:
            status = aggregate(model.workers)
            own = [*self._naming.labels.values(), *([model.name] if named else [])]
            for name, value in _values(status).items() if status else ():
                families[name].add_metric(own, value)  # type: ignore[attr-defined]
        return families.values()


def _values(status: Status) -> dict[str, float]:
    usage = max((kind.owned / (kind.total or 1) for kind in status.kv_cache), default=0.0)
    return {
        "num_requests_running": status.running,
        "num_requests_waiting": status.waiting,
        "kv_cache_usage_perc": usage,
        "prefix_cache_queries": status.prefix_queries,
        "prefix_cache_hits": status.prefix_hits,
    }
