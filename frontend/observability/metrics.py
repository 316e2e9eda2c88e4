"""Prometheus metrics of a frontend: the metrics of each model, and the metrics of HTTP, which belong to no model.

Workers export metrics of their own, under other names. Observations are additions in plain Python; `flush` carries
them over to prometheus-client once a second and at every scrape. With PROMETHEUS_MULTIPROC_DIR set (before
prometheus-client is imported) the values lie in files of that folder, so that any frontend reports for all frontends,
and the counts of a process that died remain.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from frontend.observability.model_metrics import BufferedHistogram, ModelFamilies, ModelMetrics, WorkerGauges
from shared.metrics_page import BulkHistogram, Collector, MetricsPage

LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
MAX_KEYS = 256  # limit on names of API keys with a label of their own
OTHER_KEYS = "(others)"
MAX_MODELS = 1024  # limit on model names with a label of their own; a running server may get new names
OTHER_MODELS = "(others)"
# Known label values begin at 0: a series that first appears as 1 has no rate, and no alert would see it.
REJECTED = (
    "queue_full", "draining", "not_ready", "worker_lost", "shutdown", "model_loading", "model_failed", "asleep", "busy",
)  # fmt: skip
REFUSED = (
    "bad_host", "bad_request", "head_too_large", "request_timeout", "too_many_connections", "too_many_pipelined",
    "transfer_coding", "upgrade", "write_timeout",
)  # fmt: skip
BATCH_LINES = ("succeeded", "errored", "cancelled", "expired")


class PrometheusMetrics:
    """Counts what the middleware and the HTTP protocol report; `text` is the answer of /metrics.

    models: the name of each model → its metrics, which the model's service counts
    """

    def __init__(
        self, prefix: str = "sluice_", names: Sequence[str] = ("",), aliases: str = "none", *, on_demand: bool = False
    ) -> None:
        """
        names: the names of the models. Series that belong to no model get the first name as their label, because
            dashboards select series by this label; an empty name makes no label
        aliases: the value of --metrics-aliases: another server; the page also has the metrics under its names
        on_demand: whether models are loaded on demand; the page then has the metrics of their workers, too
        """
        self._prefix = prefix
        self.registry = CollectorRegistry()
        self._families = ModelFamilies(prefix, self.registry, named=any(names))
        self.models = {name: ModelMetrics(self._families, name) for name in names}
        counter = self._counter
        lag = BulkHistogram(
            prefix + "frontend_loop_lag_seconds", "Delay of the event loop", registry=self.registry,
            buckets=LAG_BUCKETS_S,
        )  # fmt: skip
        self._lag = BufferedHistogram(lag, LAG_BUCKETS_S)
        self._rejected = counter("rejected", "Requests answered with 503", "reason", REJECTED)
        self._refused = counter("http_refused", "Connections and requests that reached no route", "reason", REFUSED)
        self._batch_lines = counter("batch_lines", "Lines of batches that have ended", "state", BATCH_LINES)
        self._by_key = (
            counter("key_requests", "HTTP requests made with the API key of this name", "key"),
            counter("key_prompt_tokens", "Prompt tokens of requests made with the API key of this name", "key"),
            counter("key_generation_tokens", "Tokens generated for the API key of this name", "key"),
        )
        self._storage_refused = counter(
            "key_storage_refused", "Requests of this API key that --store-max-key-bytes kept out of the store",
            "key",
        )  # fmt: skip
        self.stored: Callable[[], Mapping[str, Stored]] = dict  # what each key has in the store
        self._image_metrics = ImageMetrics(prefix, self.registry)
        self._new_by_key: dict[str, list[int]] = {}
        counted: Collector = _Multiprocess() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else self.registry
        sources: list[Collector] = [counted, WorkerGauges(prefix, self.models.values()), StoredGauges(prefix, self)]
        if on_demand:
            from frontend.observability.aliases import LoadMetrics, WorkerSums

            sources += [WorkerSums(prefix, self.models.values()), LoadMetrics(prefix, self.models.values())]
        self._page = MetricsPage(sources, prefix, names[0], packages=()).registry()
        if aliases != "none":
            from frontend.observability.aliases import OTHERS, OtherNames

            self._page.register(OtherNames(OTHERS[aliases], counted, prefix, self.models.values()))

    def _counter(self, name: str, text: str, label: str, values: Iterable[str] = ()) -> Counter:
        counter = Counter(self._prefix + name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def of_model(self, name: str) -> ModelMetrics:
        """Returns the metrics of a model, which may be new. Beyond MAX_MODELS, all new models count as one."""
        label = name if name in self.models or len(self.models) < MAX_MODELS else OTHER_MODELS
        if label not in self.models:
            self.models[label] = ModelMetrics(self._families, label)
        return self.models[label]

    # observations

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def batch_lines(self, state: str, count: int) -> None:
        """Counts lines of batches to which this process has given their outcome."""
        self._batch_lines.labels(state).inc(count)

    def storage_refused(self, key: str | None) -> None:
        """Counts a request, of the key of this name, that the limit of stored bytes has kept from the store."""
        if key is not None:
            known = self._new_by_key
            self._storage_refused.labels(key if key in known or len(known) < MAX_KEYS else OTHER_KEYS).inc()

    def request_ended(self, key: str | None, prompt_tokens: int | None, generation_tokens: int | None) -> None:
        """Counts an HTTP request that has ended. `key` is the name of its API key, None if the server has no keys."""
        if key is not None:
            counts = self._new_by_key.get(key)
            if counts is None:
                label = key if len(self._new_by_key) < MAX_KEYS else OTHER_KEYS
                counts = self._new_by_key.setdefault(label, [0, 0, 0])
            counts[0] += 1
            counts[1] += prompt_tokens or 0
            counts[2] += generation_tokens or 0

    def loop_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    # reading

    def flush(self) -> None:
        """Carries observations since the last call over to prometheus-client. Models have a `flush` of their own."""
        self._lag.flush()
        self._image_metrics.flush()
        for key, counts in self._new_by_key.items():
            for counter, count in zip(self._by_key, counts, strict=True):
                counter.labels(key).inc(count)
            counts[:] = 0, 0, 0

    def text(self, reader: str | None = None) -> bytes:
        """Returns Prometheus' text format: the counts of all frontends that share the folder, and our gauges.

        The counts of a model are as old as the last flush of its metrics.

        reader: the name of the key that reads the page, which then names no other key; None: it names all
        """
        self.flush()
        page = generate_latest(self._page)
        if reader is None:
            return page
        begins, own = f"{self._prefix}key_".encode(), f'key="{reader}"'.encode()
        lines = page.splitlines(keepends=True)
        return b"".join(line for line in lines if own in line or not line.startswith(begins))


class Stored(Protocol):
    """What a key has in the store: bytes, and kept answers."""

    bytes: int
    answers: int


class StoredGauges:
    """Collects what each API key has in the store. All frontends with the same store tell the same."""

    def __init__(self, prefix: str, metrics: PrometheusMetrics) -> None:
        self._prefix, self._metrics = prefix, metrics

    def collect(self) -> Iterable[Metric]:
        sums = [
            GaugeMetricFamily(self._prefix + name, text, labels=["key"])
            for name, text in (
                ("key_stored_bytes", "Bytes that the API key of this name has in the store"),
                ("key_kept_answers", "Kept answers of the API key of this name"),
            )
        ]
        counts: dict[str, list[int]] = {}
        for key, stored in self._metrics.stored().items():
            known = counts.setdefault(key if len(counts) < MAX_KEYS else OTHER_KEYS, [0, 0])
            known[0] += stored.bytes
            known[1] += stored.answers
        for gauge, values in zip(sums, zip(*counts.values(), strict=True), strict=False):
            for key, value in zip(counts, values, strict=True):
                gauge.add_metric([key], value)
        yield from sums


class _Multiprocess:
    """Reads, at each scrape, the files that the frontends of one port write."""

    def collect(self) -> Iterable[Metric]:
        yield from MultiProcessCollector(None).collect()  # type: ignore[no-untyped-call]


# A frontend's metrics of the images in requests.

OUTCOMES = ("decoded", "refused", "not_decoded")


class ImageMetrics:
    """The Prometheus metrics of images."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        images = Counter(prefix + "pictures", "Images given to a process that decodes", ["outcome"], registry=registry)
        self._outcomes = {outcome: images.labels(outcome) for outcome in OUTCOMES}
        text = "Time that images waited for a process that decodes, and were decoded in it"
        self._seconds = Counter(prefix + "picture_decode_seconds", text, registry=registry)

    def flush(self) -> None:
        """Carries the counts since the last call over to prometheus-client."""
        counts = image_counts()
        for outcome in OUTCOMES:
            self._outcomes[outcome].inc(getattr(counts, outcome))
        self._seconds.inc(counts.seconds)
        counts.clear()


@dataclass(slots=True)
class ImageCounts:
    """Counts since the last flush.

    refused: files that are no image, or that the server does not accept
    not_decoded: files that were not decoded for a reason outside the file, such as a child that did not start
    seconds: time that all files waited for a child process and were decoded in it
    """

    decoded: int = 0
    refused: int = 0
    not_decoded: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        self.decoded = self.refused = self.not_decoded = 0
        self.seconds = 0.0


@cache
def image_counts() -> ImageCounts:
    """Returns the counts of this process: all its models share the child processes that decode."""
    return ImageCounts()
