"""Prometheus metrics of a frontend: the metrics of each model, and the metrics of HTTP, which belong to no model.

Workers export metrics of their own, under other names. Observations are additions in plain Python; `flush` carries
them over to prometheus-client once a second and at every scrape. With PROMETHEUS_MULTIPROC_DIR set (before
prometheus-client is imported) the values lie in files of that folder, so that any frontend reports for all frontends,
and the counts of a process that died remain.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from frontend.generation.generation import RequestMetrics
from frontend.request import Finish
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import WorkerStatus
from shared.launcher_messages import ModelState
from shared.metrics_page import MODEL_LABEL, BulkHistogram, Collector, MetricsPage, naming

# Prometheus metrics of each model: its requests, tokens and latencies as clients see them, and its workers.
#
# The models share the families of metrics. Each model has its own series, with its name in the label `model_name`. If
# there is only one model and it has no name, series have no such label.

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
# Known label values begin at 0: a series that first appears as 1 has no rate, and no alert would see it.
ABORTED = (
    "client", "stop", "deadline_exceeded", "write_timeout", "invalid_grammar", "worker_error", "aborted", "shutdown",
)  # fmt: skip
PREFILLS = ("done", "failed", "lost", "late", "refused", "ended")  # see frontend/workers/remote_prefill.py
M = TypeVar("M", BulkHistogram, Counter)


class ModelFamilies:
    """The families of metrics that the models of a frontend share."""

    def __init__(self, prefix: str, registry: CollectorRegistry, *, named: bool) -> None:
        """named: whether every series has a label with the name of its model"""
        own = (MODEL_LABEL,) if named else ()
        self.reason: Callable[[str], str] = naming(prefix).reason

        def histogram(name: str, text: str, bounds: Sequence[float]) -> BulkHistogram:
            return BulkHistogram(prefix + name, text, own, registry=registry, buckets=bounds)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, (*own, *labels), registry=registry)

        self.ttft = histogram("time_to_first_token_seconds", "From a request to its first token", LATENCY_BUCKETS_S)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a stream", ITL_BUCKETS_S)
        self.e2e = histogram("e2e_request_latency_seconds", "From a request to its last token", LATENCY_BUCKETS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self.generation_tokens = counter("generation_tokens", "Tokens received for clients")
        self.success = counter("request_success", "Sequences that ended with success", "finished_reason")
        self.aborted = counter("aborts", "Sequences that were cut off", "reason")
        self.wire = {
            "gaps": counter("bus_gaps", "Gaps found in workers' events"),
            "resyncs": counter("resyncs", "Requests to a worker to send output again"),
            "resumed": counter("streams_resumed", "Streams that continued after their worker was lost"),
            "lost": counter("streams_lost", "Streams that could not be continued"),
            "moved": counter("streams_moved", "Streams that continued at another worker"),
        }
        self.prefills = counter("remote_prefills", "Prompts given to a prefill worker, by how that ended", "result")


@dataclass(frozen=True, slots=True)
class Residence:
    """The state of a model that is loaded on demand. waiters: how many requests of this frontend wait for the model"""

    state: ModelState
    waiters: int


class ModelMetrics(RequestMetrics):
    """Counts what the service of one model reports, and what its pool of workers counts.

    workers: the model's workers at the last flush
    residence: None for a model that is always loaded
    """

    def __init__(self, families: ModelFamilies, name: str) -> None:
        """name: the first name that the model is served under; empty if series have no label with it"""
        self.name = name
        self.workers: Sequence[WorkerStatus] = ()
        self.residence: Residence | None = None
        self._label = (name,) if name else ()
        self._ttft = BufferedHistogram(self._own(families.ttft), LATENCY_BUCKETS_S)
        self._itl = BufferedHistogram(self._own(families.itl), ITL_BUCKETS_S)
        self._e2e = BufferedHistogram(self._own(families.e2e), LATENCY_BUCKETS_S)
        self._prompt_tokens = self._own(families.prompt_tokens)
        self._generation_tokens = self._own(families.generation_tokens)
        self._success = {
            finish: families.success.labels(*self._label, families.reason(finish.value)) for finish in Finish
        }
        self._aborted = families.aborted
        self._wire = {event: self._own(counter) for event, counter in families.wire.items()}
        self._wire |= {f"prefill_{how}": families.prefills.labels(*self._label, how) for how in PREFILLS}
        self._flushed_wire = ConnectionCounters()
        self._new_tokens = [0, 0]  # prompt tokens and generated tokens since the last flush
        for reason in ABORTED:
            self._aborted.labels(*self._label, reason)

    def _own(self, metric: M) -> M:
        return metric.labels(*self._label) if self._label else metric

    def admitted(self, prompt_tokens: int) -> None:
        self._new_tokens[0] += prompt_tokens

    def first_tokens(self, seconds: float, tokens: int) -> None:
        self._new_tokens[1] += tokens
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self._new_tokens[1] += tokens
        self._itl.observe(seconds / tokens, tokens)

    def finished(self, finish: Finish, seconds: float) -> None:
        self._success[finish].inc()
        self._e2e.observe(seconds)

    def aborted(self, reason: str) -> None:
        self._aborted.labels(*self._label, reason).inc()

    def flush(self, wire: ConnectionCounters, workers: Sequence[WorkerStatus]) -> None:
        """Carries observations since the last call over to prometheus-client.

        wire: the pool's counts, which only grow
        workers: how the pool sees its workers now
        """
        for histogram in (self._ttft, self._itl, self._e2e):
            histogram.flush()
        prompt, generation = self._new_tokens
        self._new_tokens[:] = 0, 0
        self._prompt_tokens.inc(prompt)
        self._generation_tokens.inc(generation)
        for name, counter in self._wire.items():
            count = getattr(wire, name)
            counter.inc(max(0, count - getattr(self._flushed_wire, name)))
            setattr(self._flushed_wire, name, count)
        self.workers = workers


class WorkerGauges:
    """Collects how many workers of each model this frontend knows, and how many of them are ready."""

    def __init__(self, prefix: str, models: Collection[ModelMetrics]) -> None:
        self._prefix = prefix
        self._models = models

    def collect(self) -> Iterable[Metric]:
        labels = [MODEL_LABEL] if any(model.name for model in self._models) else []
        known = GaugeMetricFamily(self._prefix + "workers", "Workers that this frontend knows", labels=labels)
        ready = GaugeMetricFamily(
            self._prefix + "workers_ready", "Workers that take requests of this frontend now", labels=labels
        )
        for model in self._models:
            own = [model.name] if model.name else []
            known.add_metric(own, len(model.workers))
            ready.add_metric(own, sum(worker.ready for worker in model.workers))
        yield from (known, ready)


# Histograms that are cheap to observe: observations are additions in plain Python until the next flush.


class BufferedHistogram:
    """Holds the observations of one histogram until the next flush."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_total")

    def __init__(self, histogram: BulkHistogram, bounds: Sequence[float]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def flush(self) -> None:
        if any(self._counts):
            self._histogram.add(self._counts, self._total)
            self._counts = [0] * len(self._counts)
            self._total = 0.0


LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
MAX_KEYS = 256  # limit on names of API keys with a label of their own
OTHER_KEYS = "(others)"
MAX_MODELS = 1024  # limit on model names with a label of their own; a running server may get new names
OTHER_MODELS = "(others)"
# Known label values begin at 0: a series that first appears as 1 has no rate, and no alert would see it.
REJECTED = (
    "queue_full", "draining", "not_ready", "worker_lost", "shutdown", "model_loading", "model_failed", "asleep", "busy",
    "streams_full", "too_many_readers",
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
