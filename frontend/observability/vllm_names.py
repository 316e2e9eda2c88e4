"""Repeats a frontend's metrics under vLLM's names, for dashboards, autoscalers and gateways written for vLLM.

vLLM has all metrics on one page, so this page repeats the workers' metrics, too (worker_sums.py).
"""

from collections.abc import Collection, Iterator

from prometheus_client.core import Metric

from frontend.observability.model_metrics import ModelMetrics
from frontend.observability.worker_sums import WorkerSums
from shared.logs.metrics_page import Collector, naming

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
        self._of_workers = WorkerSums(VLLM, models)
        self._naming = naming(VLLM)

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            yield family
            name = family.name.removeprefix(self._prefix)
            if name in SAME:
                yield self._renamed(family, name)
        yield from self._of_workers.collect()

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
