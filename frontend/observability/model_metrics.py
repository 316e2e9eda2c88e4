"""Prometheus metrics of each model: its requests, tokens and latencies as clients see them, and its workers.

The models share the families of metrics. Each model has its own series, with its name in the label `model_name`. If
there is only one model and it has no name, series have no such label.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from frontend.generation.generation import RequestMetrics
from frontend.request import Finish
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import WorkerStatus
from shared.launcher_messages import ModelState
from shared.metrics_page import MODEL_LABEL, BulkHistogram, naming

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
