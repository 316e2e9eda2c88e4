"""Prometheus metrics of a frontend: HTTP requests, tokens and latencies as clients see them, and worker connections.

Workers export what they compute; no name is exported by both. Observations are additions in plain Python; `flush`
carries them over to prometheus-client once a second and at every scrape. With PROMETHEUS_MULTIPROC_DIR set (before
prometheus-client is imported) the values lie in files of that folder, so that any frontend reports for all of them, and
the counts of a process that died remain.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from frontend.generation.generation import RequestMetrics
from frontend.request import Finish
from frontend.workers.listener import WireCounters
from frontend.workers.status import WorkerStatus
from shared.metrics_page import MetricsPage, naming

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
MAX_KEYS = 256  # names of API keys that have a label of their own
OTHER_KEYS = "(others)"

# Known label values begin at 0: a series that first appears as 1 has no rate, and no alert would see it.
REJECTED = ("queue_full", "draining", "not_ready", "worker_lost", "shutdown")
ABORTED = ("client", "stop", "deadline_exceeded", "write_timeout", "worker_error", "aborted", "shutdown")
REFUSED = (
    "bad_request", "head_too_large", "request_timeout", "too_many_connections", "too_many_pipelined", "upgrade",
    "write_timeout",
)  # fmt: skip


class BulkHistogram(Histogram):
    """A histogram that also takes many observations at once."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds `counts[i]` observations to bucket i (the last is +Inf); the sum of their values is `total`."""
        for value, count in zip(self._buckets, counts, strict=True):
            if count:
                value.inc(count)
        if total:
            self._sum.inc(total)


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


class PrometheusMetrics(RequestMetrics):
    """Counts what the service, the middleware and the HTTP protocol report; `text` is the answer of /metrics."""

    def __init__(self, prefix: str = "sluice_", model_name: str = "") -> None:
        self._prefix = prefix
        self._reason = naming(prefix).reason
        self.registry = CollectorRegistry()
        self._histograms: list[BufferedHistogram] = []
        histogram, counter = self._histogram, self._counter
        self._ttft = histogram("time_to_first_token_seconds", "From a request to its first token", LATENCY_BUCKETS_S)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a stream", ITL_BUCKETS_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From a request to its last token", LATENCY_BUCKETS_S)
        self._lag = histogram("frontend_loop_lag_seconds", "Delay of the event loop", LAG_BUCKETS_S)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests")
        self._generation_tokens = counter("generation_tokens", "Tokens received for clients")
        reasons = map(self._reason, Finish)
        self._success = counter("request_success", "Sequences that ended with success", "finished_reason", reasons)
        self._rejected = counter("rejected", "Requests answered with 503", "reason", REJECTED)
        self._aborted = counter("aborts", "Sequences that were cut off", "reason", ABORTED)
        self._refused = counter("http_refused", "Connections and requests that reached no route", "reason", REFUSED)
        self._by_key = (
            counter("key_requests", "HTTP requests made with the API key of this name", "key"),
            counter("key_prompt_tokens", "Prompt tokens of requests made with the API key of this name", "key"),
            counter("key_generation_tokens", "Tokens generated for the API key of this name", "key"),
        )
        self._wire = {
            "gaps": counter("bus_gaps", "Gaps found in workers' events"),
            "resyncs": counter("resyncs", "Requests to a worker to send output again"),
            "resumed": counter("streams_resumed", "Streams that continued after their worker was lost"),
            "lost": counter("streams_lost", "Streams that could not be continued"),
            "moved": counter("streams_moved", "Streams that continued at another worker"),
        }
        self._flushed_wire = WireCounters()
        self._new_tokens = [0, 0]  # prompt, generation; since the last flush
        self._new_by_key: dict[str, list[int]] = {}
        counted = _Multiprocess() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else self.registry
        self._gauges = _Gauges(prefix)
        self._page = MetricsPage([counted, self._gauges], prefix, model_name, packages=()).registry()

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> BufferedHistogram:
        histogram = BulkHistogram(self._prefix + name, text, registry=self.registry, buckets=bounds)
        buffered = BufferedHistogram(histogram, bounds)
        self._histograms.append(buffered)
        return buffered

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        counter = Counter(self._prefix + name, text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    # observations

    def admitted(self, prompt_tokens: int) -> None:
        self._new_tokens[0] += prompt_tokens

    def first_tokens(self, seconds: float, tokens: int) -> None:
        self._new_tokens[1] += tokens
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self._new_tokens[1] += tokens
        self._itl.observe(seconds / tokens, tokens)

    def finished(self, finish: Finish, seconds: float) -> None:
        self._success.labels(self._reason(finish.value)).inc()
        self._e2e.observe(seconds)

    def aborted(self, reason: str) -> None:
        self._aborted.labels(reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

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

    def flush(self, wire: WireCounters) -> None:
        """Carries what was observed since the last call over to prometheus-client; the counts of `wire` only grow."""
        for histogram in self._histograms:
            histogram.flush()
        prompt, generation = self._new_tokens
        self._new_tokens[:] = 0, 0
        self._prompt_tokens.inc(prompt)
        self._generation_tokens.inc(generation)
        for key, counts in self._new_by_key.items():
            for counter, count in zip(self._by_key, counts, strict=True):
                counter.labels(key).inc(count)
            counts[:] = 0, 0, 0
        for name, counter in self._wire.items():
            count = getattr(wire, name)
            counter.inc(max(0, count - getattr(self._flushed_wire, name)))
            setattr(self._flushed_wire, name, count)

    def text(self, wire: WireCounters, workers: Sequence[WorkerStatus]) -> bytes:
        """Returns Prometheus' text format: the counts of all frontends that share the folder, and this one's gauges."""
        self.flush(wire)
        self._gauges.workers = workers
        return generate_latest(self._page)


class _Multiprocess:
    """The files that the frontends of one port write, read anew at each scrape."""

    def collect(self) -> Iterable[Metric]:
        yield from MultiProcessCollector(None).collect()  # type: ignore[no-untyped-call]


class _Gauges:
    """What this frontend sees of the workers."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.workers: Sequence[WorkerStatus] = ()

    def collect(self) -> Iterable[Metric]:
        ready = sum(worker.ready for worker in self.workers)
        gauges = (
            ("workers", "Workers that this frontend knows", len(self.workers)),
            ("workers_ready", "Workers that take requests of this frontend now", ready),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(self._prefix + name, text, value=value)
