"""A frontend's metrics under the names of another server, for its dashboards, autoscalers and gateways.

Other servers report all metrics on one page, so this page includes the workers' metrics (worker_sums.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric, Sample

from frontend.observability.model_metrics import ModelMetrics
from frontend.observability.worker_sums import OWN, Row, WorkerSums, cache_share
from shared.config.frontend import ALIASES
from shared.logs.metrics_page import Collector, naming

LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


@dataclass(frozen=True)
class ServerNames:
    """The metrics of another server.

    same: the frontend's metric families that have the same name on that server
    workers: the metrics that are computed from the statuses of workers
    sums: that server's counters of seconds → the frontend's histograms whose sums these counters show
    labelled: whether the series have labels; False: there is one series for all models
    """

    prefix: str
    same: Collection[str] = ()
    workers: Collection[Row] = OWN
    sums: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = True


# The value of --metrics-aliases → the metrics of that server.
OTHERS: Mapping[str, ServerNames] = {
    "vllm": ServerNames(ALIASES["vllm"], ("prompt_tokens", "generation_tokens", "request_success", *LATENCIES)),
    "sglang": ServerNames(
        ALIASES["sglang"],
        ("prompt_tokens", "generation_tokens", *LATENCIES),
        (
            Row("num_running_reqs", "gauge", "Sequences running", lambda s: s.running),
            Row("num_queue_reqs", "gauge", "Sequences waiting", lambda s: s.waiting),
            Row("token_usage", "gauge", "Share of the K/V pages that sequences own, 0 to 1", cache_share),
            Row("gen_throughput", "gauge", "Tokens sampled per second", lambda s: s.generation_tokens_s),
            Row("cache_hit_rate", "gauge", "Share of tokens found in the prefix cache, since the start",
                lambda s: s.prefix_hits / (s.prefix_queries or 1)),
            Row("cached_tokens", "counter", "Tokens found in the prefix cache", lambda s: s.prefix_hits),
        ),
    ),
    "llama.cpp": ServerNames(
        ALIASES["llama.cpp"],
        workers=(
            Row("prompt_tokens", "counter", "Prompt tokens computed", lambda s: s.prefill_tokens),
            Row("prompt_tokens_cached", "counter", "Tokens found in the prefix cache", lambda s: s.prefix_hits),
            Row("tokens_predicted", "counter", "Tokens sampled", lambda s: s.sampled_tokens),
            Row("n_decode", "counter", "Steps", lambda s: s.steps),
            Row("spec_decode_num_draft_tokens", "counter", "Draft tokens computed", lambda s: s.draft_tokens),
            Row("spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted", lambda s: s.accepted_tokens),
            Row("spec_decode_num_drafts", "counter", "Drafts computed", lambda s: sum(s.drafted_at[:1])),
            Row("prompt_tokens_seconds", "gauge", "Prompt tokens computed per second", lambda s: s.prompt_tokens_s),
            Row("predicted_tokens_seconds", "gauge", "Tokens sampled per second", lambda s: s.generation_tokens_s),
            Row("requests_processing", "gauge", "Sequences running", lambda s: s.running),
            Row("requests_deferred", "gauge", "Sequences waiting", lambda s: s.waiting),
            Row("kv_cache_usage_ratio", "gauge", "Share of the K/V pages that sequences own, 0 to 1", cache_share),
        ),
        sums={
            "prompt_seconds": "time_to_first_token_seconds",
            "tokens_predicted_seconds": "inter_token_latency_seconds",
        },
        labelled=False,
    ),
}  # fmt: skip


class OtherNames:
    """Collects the metrics that another server has, under the names of that server.

    source: collects the frontend's own metrics
    prefix: the prefix of the names in `source`
    """

    def __init__(self, names: ServerNames, source: Collector, prefix: str, models: Collection[ModelMetrics]) -> None:
        self._names, self._source, self._prefix = names, source, prefix
        self._of_workers = WorkerSums(names.prefix, models, names.workers, labelled=names.labelled)
        self._naming = naming(names.prefix)

    def collect(self) -> Iterator[Metric]:
        families = {family.name.removeprefix(self._prefix): family for family in self._source.collect()}
        for name in self._names.same:
            yield self._renamed(families[name], name)
        for name, of in self._names.sums.items():
            yield CounterMetricFamily(self._names.prefix + name, families[of].documentation, _sum(families[of].samples))
        yield from self._of_workers.collect()

    def _renamed(self, family: Metric, name: str) -> Metric:
        """Returns the family under the other server's name, and with that server's names of finish reasons."""
        renamed = Metric(self._names.prefix + name, family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = {**self._naming.labels, **sample.labels}
            if "finished_reason" in labels:
                labels["finished_reason"] = self._naming.reason(labels["finished_reason"])
            series = self._names.prefix + sample.name.removeprefix(self._prefix), tuple(labels.items())
            sums[series] = sums.get(series, 0.0) + sample.value
        for (series_name, pairs), value in sums.items():
            renamed.add_sample(series_name, dict(pairs), value)
        return renamed


def _sum(samples: Iterable[Sample]) -> float:
    """Returns the sum of all observations of a histogram."""
    return sum(sample.value for sample in samples if sample.name.endswith("_sum"))
