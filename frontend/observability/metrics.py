"""What a frontend counts, and how Prometheus reads it.

Observations are additions in plain Python; `flush` carries them over to prometheus-client once a second and at
every scrape. With PROMETHEUS_MULTIPROC_DIR set (before prometheus-client is imported) the values lie in files of
that folder, so that any frontend answers for all, and those of a process that died still count. What the worker
alone knows comes from its latest Status when somebody asks, so it is never added up.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from frontend.generation.service import RequestMetrics
from frontend.request import Finish
from frontend.workers.connection import WireCounters
from frontend.workers.status import WorkerStatus, aggregate
from shared.messages import Status, Timings

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
LAGS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
MOST_KEYS = 256  # names of keys that are counted apart

# Labels that are known beforehand begin at 0: what first appears as 1 has no rate, and no alert would see it.
REJECTED = ("queue_full", "draining", "not_ready", "worker_lost", "shutdown")
ABORTED = ("client", "stop", "deadline_exceeded", "write_timeout", "worker_error", "aborted", "shutdown")
REFUSED = (
    "bad_request", "head_too_large", "request_timeout", "too_many_connections", "too_many_pipelined", "upgrade",
    "write_timeout",
)  # fmt: skip


class BulkHistogram(Histogram):
    """A histogram that also takes many observations at once."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """`counts[i]` observations fell into bucket i (the last is +Inf); their sum is `total`."""
        for value, count in zip(self._buckets, counts, strict=True):
            if count:
                value.inc(count)
        if total:
            self._sum.inc(total)


class BufferedHistogram:
    """Observations of one histogram until the next flush."""

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
    """The service's meter, and the text of /metrics."""

    def __init__(self, prefix: str = "sluice_") -> None:
        self._prefix = prefix
        self.registry = CollectorRegistry()
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._ttft = self._tally("time_to_first_token_seconds", "from the request to its first token", LATENCY)
        self._itl = self._tally("inter_token_latency_seconds", "between two tokens of a stream", GAPS)
        self._e2e = self._tally("e2e_request_latency_seconds", "from the request to its last token", LATENCY)
        self._queue = self._tally("request_queue_time_seconds", "waiting for a place in a step", LATENCY)
        self._prefill = self._tally("request_prefill_time_seconds", "computing the prompt", LATENCY)
        self._decode = self._tally("request_decode_time_seconds", "from the first token to the last", LATENCY)
        self._lag = self._tally("frontend_loop_lag_seconds", "how late the event loop was", LAGS)
        self._tallies = (self._ttft, self._itl, self._e2e, self._queue, self._prefill, self._decode, self._lag)
        self._prompt = self._counter("prompt_tokens", "prompt tokens of admitted requests")
        self._generation = self._counter("generation_tokens", "tokens received from the worker")
        self._success = self._counter("request_success", "sequences that ended well", "finished_reason", Finish)
        self._rejected = self._counter("rejected", "requests answered with 503", "reason", REJECTED)
        self._aborts = self._counter("aborts", "sequences that were cut off", "reason", ABORTED)
        self._refused = self._counter(
            "http_refused", "connections and requests that reached no route", "reason", REFUSED
        )
        self._keyed = {
            what: self._counter(f"key_{what}", text, "key")
            for what, text in (
                ("requests", "HTTP requests with an API key of this name"),
                ("prompt_tokens", "prompt tokens asked about with it"),
                ("generation_tokens", "tokens generated for it"),
            )
        }
        self._by_key: dict[str, list[int]] = {}
        self._wire = {
            "gaps": self._counter("bus_gaps", "holes in the worker's events"),
            "resyncs": self._counter("resyncs", "streams asked for again"),
            "resumed": self._counter("streams_resumed", "streams that outlived a worker"),
            "lost": self._counter("streams_lost", "streams that could not be repaired"),
            "moved": self._counter("streams_moved", "streams that went on at another worker"),
        }
        self._carried = WireCounters()
        self._tokens = [0, 0]  # prompt, generation; since the last flush
        self._lookups = [
            self._gauge("prefix_cache_queries_total", "tokens looked up in the prefix cache"),
            self._gauge("prefix_cache_hits_total", "tokens found in the prefix cache"),
        ]
        self._epochs: dict[str, EpochTotals] = {}  # by address, of all workers that ever were

    def _tally(self, name: str, text: str, bounds: Sequence[float]) -> BufferedHistogram:
        return BufferedHistogram(
            BulkHistogram(self._prefix + name, text, registry=self.registry, buckets=bounds), bounds
        )

    def _counter(self, name: str, text: str, label: str = "", known: Iterable[str] = ()) -> Counter:
        counter = Counter(self._prefix + name, text, [label] if label else [], registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(self._prefix + name, text, registry=self.registry, multiprocess_mode="max")

    # the service's observations

    def admitted(self, prompt_tokens: int) -> None:
        self._tokens[0] += prompt_tokens

    def first(self, seconds: float, tokens: int) -> None:
        self._tokens[1] += tokens
        self._ttft.observe(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        """`tokens` came together, `seconds` after those before them."""
        self._tokens[1] += tokens
        self._itl.observe(seconds / tokens, tokens)

    def finished(self, finish: Finish, seconds: float, timings: Timings) -> None:
        self._success.labels(finish.value).inc()
        self._e2e.observe(seconds)
        if timings != Timings():
            self._queue.observe(timings.queue_ms / 1e3)
            self._prefill.observe(timings.prefill_ms / 1e3)
            self._decode.observe(timings.decode_ms / 1e3)

    def aborted(self, reason: str) -> None:
        self._aborts.labels(reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def exchanged(self, key: str | None, prompt: int | None, generated: int | None) -> None:
        """A request has ended, of the name of a key if there are keys."""
        if key is not None:
            counts = self._by_key.get(key)
            if counts is None:
                counts = self._by_key.setdefault(key if len(self._by_key) < MOST_KEYS else "(others)", [0, 0, 0])
            counts[0] += 1
            counts[1] += prompt or 0
            counts[2] += generated or 0

    def lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    # reading

    def flush(self, wire: WireCounters, members: Sequence[WorkerStatus]) -> None:
        """Carry over what was gathered. `wire` only grows; `members` are the workers now."""
        for tally in self._tallies:
            tally.flush()
        prompt, generation = self._tokens
        self._tokens[:] = 0, 0
        self._prompt.inc(prompt)
        self._generation.inc(generation)
        for key, counts in self._by_key.items():
            for counter, count in zip(self._keyed.values(), counts, strict=True):
                counter.labels(key).inc(count)
            counts[:] = 0, 0, 0
        for name, counter in self._wire.items():
            now = getattr(wire, name)
            counter.inc(max(0, now - getattr(self._carried, name)))
            setattr(self._carried, name, now)
        for member in members:
            if member.status is not None:
                self._epochs.setdefault(member.address, EpochTotals()).see(member.status)
        for i, gauge in enumerate(self._lookups):
            known = sum(epochs.totals[i] for epochs in self._epochs.values())
            gauge.set(max(known, gauge._value.get()))  # which a frontend before this one may have left, who knew more

    def text(self, wire: WireCounters, members: Sequence[WorkerStatus]) -> bytes:
        """Prometheus' text format: all frontends that share the folder, and the workers' state."""
        self.flush(wire, members)
        registry = CollectorRegistry()
        source = MultiProcessCollector(None) if self._shared else self.registry  # type: ignore[no-untyped-call]
        registry.register(_Page(source.collect(), self._prefix, members))
        return generate_latest(registry)


class EpochTotals:
    """Makes a worker's counts go on where they were when it comes back and starts from zero."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._base = (0, 0)
        self._last = (0, 0)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens looked up and found, in all its lives."""
        return self._base[0] + self._last[0], self._base[1] + self._last[1]

    def see(self, status: Status) -> None:
        if self._epoch is not None and status.epoch != self._epoch:
            self._base = self.totals
        self._epoch = status.epoch
        self._last = (status.prefix_queries, status.prefix_hits)


class _Page:
    """One scrape: what was counted, then what the workers say of themselves."""

    def __init__(self, counted: Iterable[Metric], prefix: str, members: Sequence[WorkerStatus]) -> None:
        self._counted = counted
        self._prefix = prefix
        self._members = members

    def collect(self) -> Iterable[Metric]:
        for metric in self._counted:
            yield _as_counter(metric) if metric.type == "gauge" and metric.name.endswith("_total") else metric
        for name, text, count in _reachable(self._members):
            yield GaugeMetricFamily(self._prefix + name, text, value=count)
        status = aggregate(self._members)
        if status is not None:
            for name, text, value in _worker_gauges(status):
                yield GaugeMetricFamily(self._prefix + name, text, value=value)
            yield self._by_worker()

    def _by_worker(self) -> Metric:
        """One worker needs no label; of several each has its address."""
        several = len(self._members) > 1
        family = GaugeMetricFamily(
            self._prefix + "worker_epoch", "which incarnation of the worker answers", labels=["worker"] * several
        )
        for member in self._members:
            if member.status is not None:
                family.add_metric([member.address] * several, member.status.epoch)
        return family


def _as_counter(gauge: Metric) -> Metric:
    """A count kept as a gauge (the highest of all processes, not their sum) under its true type."""
    counter = CounterMetricFamily(gauge.name.removesuffix("_total"), gauge.documentation)
    for sample in gauge.samples:
        counter.add_metric([], sample.value)
    return counter


def _reachable(members: Sequence[WorkerStatus]) -> list[tuple[str, str, int]]:
    return [
        ("workers", "workers that this frontend knows", len(members)),
        ("workers_ready", "of these, those that take requests now", sum(member.ready for member in members)),
    ]


def _worker_gauges(status: Status) -> list[tuple[str, str, float]]:
    pages = status.pages
    return [
        ("num_requests_running", "sequences in the batch", status.running),
        ("num_requests_waiting", "sequences waiting", status.waiting),
        ("kv_cache_usage_perc", "share of K/V pages owned by sequences, 0 to 1", pages.owned / max(1, pages.total)),
        ("worker_last_step_age_seconds", "since the compute loop last turned", status.last_step_age_s),
    ]
