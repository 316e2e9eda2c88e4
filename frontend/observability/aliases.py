"""A frontend's metrics under the names of another server, for its dashboards, autoscalers and gateways.

Other servers report all metrics on one page, so this page includes the workers' metrics.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample

from frontend.observability.metrics import ModelMetrics
from frontend.workers.status import WorkerStatus, aggregate
from shared.config.frontend import ALIASES
from shared.messages import Status
from shared.metrics_page import MODEL_LABEL, Collector, naming

# Metrics of the workers of each model, from their latest Statuses, for workers without a metrics page of their own.
#
# All frontends of the same workers show the same values, so a sum over frontends counts each value several times.


class Row(NamedTuple):
    """One metric of workers. kind: "gauge" or "counter"; value, labels: computed from the workers' merged Status"""

    name: str
    kind: str
    text: str
    value: Callable[[Status], float]
    labels: Callable[[Status], dict[str, str]] = lambda status: {}


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
                family.add_sample(series, labels | row.labels(status), row.value(status))
            yield family

    def _groups(self) -> Iterator[tuple[dict[str, str], Iterable[WorkerStatus]]]:
        """Yields the labels of each series, and the workers that the series is computed from."""
        if not self._labelled:
            yield {}, chain.from_iterable(model.workers for model in self._models)
            return
        for model in self._models:
            yield {**self._common, **({MODEL_LABEL: model.name} if model.name else {})}, model.workers


class LoadMetrics:
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
    "vllm": ServerNames(
        ALIASES["vllm"],
        ("prompt_tokens", "generation_tokens", "request_success", *LATENCIES),
        (
            *OWN,
            Row("cache_config_info", "gauge", "Always 1; the labels: tokens of a K/V page, and pages of all workers",
                lambda s: 1, lambda s: {"block_size": str(s.page_size), "num_gpu_blocks": str(s.pages.total)}),
        ),
    ),
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
