"""Prometheus metrics of a worker: steps, pages, the queue, and how long requests spend in each phase.

Frontends export the metrics that clients see. No frontend metric has the name of a worker metric. Counters survive
restarts: if PROMETHEUS_MULTIPROC_DIR is set before prometheus-client is imported, counters are in files in that folder,
and a scrape adds the files of this worker's earlier processes. Gauges are read from the current process at each scrape.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from shared.messages import Outcome, Quantiles, Refusal, Status
from shared.metrics_page import Collector, MetricsPage
from worker.scheduler.sequence import Plan, Sequence

STEP_BUCKETS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REQUEST_TOKENS_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
TOTALS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Sequences that lost their pages to other sequences.",
    "spec_decode_num_draft_tokens": "Draft tokens computed; see --speculation.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "wire_garbage": "Frames from frontends that are no valid requests.",
    "wire_unsent": "Frames dropped because a frontend did not keep up.",
    "leases_reaped": "Frontends that disconnected or fell silent; their requests were ended.",
    "wire_refused": "Connections and messages refused because their key is not allowed.",
}
SUCCESSES = (Outcome.EOS, Outcome.STOP, Outcome.LENGTH, Outcome.POOLED, Outcome.CHECKED, Outcome.PREFILLED)
FAILURES = tuple(outcome for outcome in Outcome if outcome not in SUCCESSES)

ExpertLoads = dict[int, list[int]]  # layer → for each expert, the number of rows that chose it


class Source(Protocol):
    """Provides the values of the gauges: the same Status that is broadcast."""

    def status(self) -> Status: ...


class Metrics:
    """Records the metrics of the worker. The compute loop calls its methods; `serve` opens the port."""

    def __init__(self, prefix: str = "sluice_", model_name: str = "", page_size: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._model_name, self._page_size = prefix, model_name, page_size
        self.expert_loads: Callable[[], ExpertLoads] = dict
        self.collectors: list[Collector] = []  # collectors of features that only some workers have
        self.registry.register(LoadsCollector(self))  # registered first, so that the same scrape shows the new counts
        histogram, counter = self._histogram, self._counter
        parts = histogram("step_duration_seconds", "Time a step takes, by its parts.", STEP_BUCKETS_S, ("part",))
        self._planning, self._running = parts.labels("plan"), parts.labels("run")
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in one step.", STEP_TOKENS_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first page.", REQUEST_BUCKETS_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first page to the first token.", REQUEST_BUCKETS_S
        )
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.", REQUEST_BUCKETS_S)
        self._inference = histogram(
            "request_inference_time_seconds", "From the first page to the end.", REQUEST_BUCKETS_S
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of sequences that had a token.", REQUEST_TOKENS_BUCKETS
        )
        self._output_tokens = histogram(
            "request_generation_tokens", "Tokens generated for sequences that had one.", REQUEST_TOKENS_BUCKETS
        )
        self._failed = counter("request_failed", "Sequences that ended without success.", "outcome", FAILURES)
        self._rejected = counter("submits_rejected", "Sequences that were not admitted.", "reason", Refusal)
        self._prefill_tokens = counter("prefill_tokens", "Prompt tokens computed, without those found in the cache.")
        self._sampled_tokens = counter("sampled_tokens", "Tokens sampled.")
        self._expert_rows = Counter(
            prefix + "expert_rows", "Rows that chose an expert of a layer; see --expert-metrics.", ("layer", "expert"),
            registry=self.registry,
        )  # fmt: skip
        self._last_loads: dict[tuple[int, int], int] = {}
        self._totals = {name: counter(name, text) for name, text in TOTALS.items()}
        self._last_totals = dict.fromkeys(TOTALS, 0)
        self._totals_lock = Lock()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(self._prefix + name, text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        """Makes a counter that starts at 0 for each label value.

        If a series first appeared with the value 1, Prometheus would compute no rate, and alerts would miss the event.
        """
        counter = Counter(self._prefix + name, text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def serve(self, source: Source, host: str, port: int) -> None:
        """Serves the metrics over HTTP. Raises OSError when the port is taken."""
        start_http_server(port, host, self.scrape_registry(source))

    def scrape_registry(self, source: Source) -> CollectorRegistry:
        """Returns a registry of everything that a scrape reads."""
        counted: Collector = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            counted = CollectorRegistry()
            counted.register(LoadsCollector(self))
            MultiProcessCollector(counted)  # type: ignore[no-untyped-call]
        gauges = StatusCollector(self._prefix, source, self._page_size)
        return MetricsPage(
            [counted, gauges, *self.collectors], self._prefix, self._model_name, packages=("torch",)
        ).registry()

    def update_totals(self, totals: Mapping[str, int]) -> None:
        """Raises the counters of TOTALS to the given totals, by name. Any thread may call this."""
        with self._totals_lock:
            for name, total in totals.items():
                self._totals[name].inc(total - self._last_totals[name])
                self._last_totals[name] = total

    def update_expert_loads(self) -> None:
        """Raises the counters of experts to the counts that `expert_loads` returns."""
        with self._totals_lock:
            for layer, counts in self.expert_loads().items():
                for expert, count in enumerate(counts):
                    counter = self._expert_rows.labels(layer, expert)
                    counter.inc(count - self._last_loads.get((layer, expert), 0))
                    self._last_loads[layer, expert] = count

    def step(self, plan: Plan, planning_s: float, running_s: float) -> None:
        """Records a step that took `planning_s` seconds to plan, and `running_s` seconds to launch and read."""
        self._planning.observe(planning_s)
        self._running.observe(running_s)
        self._step_tokens.observe(plan.tokens)

    def tokens(self, prompt: int, generated: int) -> None:
        self._prefill_tokens.inc(prompt)
        self._sampled_tokens.inc(generated)

    def rejected(self, reason: Refusal) -> None:
        self._rejected.labels(reason.value).inc()

    def ended(self, outcome: Outcome, sequence: Sequence, now: float) -> None:
        """Records the end of a sequence.

        A sequence that its frontend aborts at a stop string counts as aborted. Its times are recorded, too.
        """
        if outcome not in SUCCESSES:
            self._failed.labels(outcome.value).inc()
        if sequence.history.first_token:
            self._queue.observe(sequence.history.admitted - sequence.history.arrival)
            self._prefill.observe(sequence.history.first_token - sequence.history.admitted)
            self._decode.observe(now - sequence.history.first_token)
            self._inference.observe(now - sequence.history.admitted)
            self._prompt_tokens.observe(sequence.prompt_len)
            self._output_tokens.observe(sequence.output_len)


class LoadsCollector:
    """Updates the counters of experts at each scrape, because this would be too much work for every Status."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        self._metrics.update_expert_loads()
        yield from ()


class StatusCollector:
    """Makes the gauges from Status at each scrape."""

    def __init__(self, prefix: str, source: Source, page_size: int) -> None:
        self._prefix = prefix
        self._source = source
        self._page_size = page_size

    def collect(self) -> Iterator[Metric]:
        status = self._source.status()
        usage = max((one.owned / (one.total or 1) for one in status.kv_cache), default=0.0)
        gauges = {
            "num_requests_running": ("Sequences running.", status.running),
            "num_requests_waiting": ("Sequences waiting.", status.waiting),
            "kv_cache_usage_perc": ("Share of the K/V pages that sequences own, 0 to 1; of the fuller kind.", usage),
            "frontends": ("Frontends that are connected.", len(status.frontends)),
            "worker_epoch": ("Incarnation of the worker: rises with each restart.", status.epoch),
            "worker_last_step_age_seconds": ("Time since the compute loop last made progress.", status.last_step_age_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(self._prefix + name, text, value=float(value))
        owned = GaugeMetricFamily(
            self._prefix + "kv_cache_owned_bytes", "K/V that sequences own, by kind of layers.", labels=["kind"]
        )
        for one in status.kv_cache:
            owned.add_metric([one.kind], float(one.bytes))
        yield owned
        role = GaugeMetricFamily(
            self._prefix + "worker_role_info", "Always 1; the label is the worker's --role.", labels=["role"]
        )
        role.add_metric([status.role.value], 1.0)
        yield role
        sizes = GaugeMetricFamily(
            self._prefix + "cache_config_info",
            "Always 1; the labels are the K/V pages of the device, and the tokens of one.",
            labels=["block_size", "num_gpu_blocks"],
        )
        sizes.add_metric([str(self._page_size), str(status.pages.total)], 1.0)
        yield sizes


# The metrics of draft tokens by position: how many were computed, and how many were accepted.


class Drafts(Protocol):
    """Counts of drafts by their position among the drafts of a step (worker/scheduler/drafts.py)."""

    drafted_at: list[int]
    accepted_at: list[int]


class DraftCollector:
    """Makes the metrics at each scrape. Positions without any draft so far are left out."""

    def __init__(self, prefix: str, drafts: Drafts) -> None:
        self._prefix, self._drafts = prefix, drafts

    def collect(self) -> Iterator[Metric]:
        drafted, accepted = list(self._drafts.drafted_at), list(self._drafts.accepted_at)
        used = [at for at, count in enumerate(drafted) if count]
        yield self._counter(
            "spec_decode_num_draft_tokens_per_pos", "Draft tokens computed, by position.", drafted, used
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", accepted, used
        )

    def _counter(self, name: str, text: str, counts: list[int], used: list[int]) -> CounterMetricFamily:
        counter = CounterMetricFamily(self._prefix + name, text, labels=["position"])
        for at in used:
            counter.add_metric([str(at)], counts[at])
        return counter


# Computes rates over the last ten seconds and latencies of recent requests, for Status and `Retry-After`.

WINDOW_S = 10.0
SAMPLES = 1024  # how many observations quantiles are computed from


@dataclass(slots=True)
class Rate:
    """Measures tokens per second over the last WINDOW_S."""

    _events: deque[tuple[float, int]] = field(default_factory=deque)
    _sum: int = 0

    def add(self, now: float, count: int) -> None:
        self._events.append((now, count))
        self._sum += count
        self._forget(now)

    def per_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / WINDOW_S

    def total(self, now: float) -> int:
        """Returns the number of tokens in the last WINDOW_S."""
        self._forget(now)
        return self._sum

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] < now - WINDOW_S:
            self._sum -= self._events.popleft()[1]


@dataclass(slots=True)
class BusyRate:
    """Measures tokens per second of busy time, over the last WINDOW_S of busy time. Idle time does not count."""

    _rate: Rate = field(default_factory=Rate)
    _busy_s: float = 0.0  # total busy time
    _since: float | None = None  # the time up to which busy time is counted; None while idle

    def busy(self, now: float) -> None:
        """Starts busy time, unless it has started already."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Starts idle time."""
        self._since = None

    def add(self, now: float, count: int) -> None:
        self._busy_s += 0.0 if self._since is None else now - self._since
        self._since = now
        self._rate.add(self._busy_s, count)

    def per_second(self) -> float:
        """Returns the rate, or 0 if nothing has been measured yet."""
        return self._rate.total(self._busy_s) / min(WINDOW_S, self._busy_s) if self._busy_s else 0.0


@dataclass(slots=True)
class Recent:
    """Computes quantiles of the last SAMPLES observations."""

    _values: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, value: float) -> None:
        self._values.append(value)

    def quantiles(self) -> Quantiles:
        values = sorted(self._values.copy())
        return Quantiles(*(quantile(values, q) for q in (0.50, 0.95, 0.99))) if values else Quantiles()


def quantile(ordered: list[float], q: float) -> float:
    """Returns the nearest-rank quantile of ascending values. Raises IndexError if there are no values."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


@dataclass(slots=True)
class Stats:
    """The statistics of a worker. The compute loop updates them after each step."""

    prompt: Rate = field(default_factory=Rate)
    generation: Rate = field(default_factory=Rate)
    speed: BusyRate = field(default_factory=BusyRate)
    ttft: Recent = field(default_factory=Recent)
    itl: Recent = field(default_factory=Recent)
    e2e: Recent = field(default_factory=Recent)
    steps: int = 0

    def tokens(self, now: float, prompt: int, generated: int) -> None:
        self.steps += 1
        self.speed.add(now, prompt + generated)
        if prompt:
            self.prompt.add(now, prompt)
        if generated:
            self.generation.add(now, generated)

    def gaps(self, seconds: Iterable[float]) -> None:
        for value in seconds:
            self.itl.add(value)
