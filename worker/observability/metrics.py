"""The worker's own /metrics: what only it can see, in the names everyone's dashboards know.

Counters never fall: with PROMETHEUS_MULTIPROC_DIR set (before prometheus-client is imported) they lie in files of that
folder, and a scrape adds up those of this worker and of all that were there before it. Gauges are this one's alone.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from shared.messages import Outcome, Refusal, Status
from worker.schedule.sequence import Plan, Sequence

STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PART_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, *STEP_S[4:])
REQUEST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOTALS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Sequences whose pages were taken for others.",
    "spec_decode_num_draft_tokens": "Tokens guessed, and computed with the one before; see --speculation.",
    "spec_decode_num_accepted_tokens": "Of those, the ones that were what came.",
    "wire_garbage": "Frames from frontends that were no requests.",
    "wire_unsent": "Frames that a frontend could not take.",
    "leases_reaped": "Frontends that went away or fell silent; what they had asked for was ended.",
    "wire_refused": "Greetings and messages with a key that is not allowed.",
}
WELL = (Outcome.EOS, Outcome.STOP, Outcome.LENGTH)
OTHERWISE = tuple(outcome for outcome in Outcome if outcome not in WELL)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Source(Protocol):
    """What a scrape reads: the same snapshot that Status is made of."""

    def status(self) -> Status: ...


class Metrics:
    """Fed by the compute loop; `serve` opens the port."""

    def __init__(self, prefix: str = "sluice_") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        histogram = self._histogram
        parts = histogram("step_duration_seconds", "Where a step's time went.", PART_S, ("part",))
        self._plan = parts.labels("plan")
        self._run = parts.labels("run")
        self._iteration = histogram("iteration_tokens_total", "Tokens computed in one step.", TOKENS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first page.", REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", "From the first page to the first token.", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.", REQUEST_S)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", REQUEST_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S)
        self._success = self._counter("request_success", "Requests that ended well.", "finished_reason", WELL)
        self._failed = self._counter("request_failed", "Requests that ended otherwise.", "outcome", OTHERWISE)
        self._rejected = self._counter("rejected", "Requests that were not admitted.", "reason", Refusal)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens computed.")
        self._generation = self._counter("generation_tokens", "Tokens generated.")
        self._totals = {name: self._counter(name, text) for name, text in TOTALS.items()}
        self._carried = dict.fromkeys(TOTALS, 0)
        self._carrying = Lock()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(self._prefix + name, text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, label: str = "", known: Iterable[str] = ()) -> Counter:
        """Labels begin at 0: what first appears as 1 has no rate, and no alert would see it."""
        counter = Counter(self._prefix + name, text, [label] if label else [], registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter

    def serve(self, source: Source, host: str, port: int) -> None:
        """Raises OSError when the port is taken."""
        start_http_server(port, host, self.readable(source))

    def readable(self, source: Source) -> CollectorRegistry:
        """All that a scrape reads; call it once."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(_Scrape(self._prefix, source))
        return registry

    def carry(self, totals: Mapping[str, int]) -> None:
        """Running sums that somebody else keeps, named as in TOTALS; called from any thread, now and then."""
        with self._carrying:
            for name, total in totals.items():
                self._totals[name].inc(total - self._carried[name])
                self._carried[name] = total

    def step(self, plan: Plan, planning_s: float, running_s: float) -> None:
        """A turn with a step: how long it was planned, and launched and read, in seconds."""
        self._plan.observe(planning_s)
        self._run.observe(running_s)
        self._iteration.observe(plan.tokens)

    def tokens(self, prompt: int, generated: int) -> None:
        self._prompt.inc(prompt)
        self._generation.inc(generated)

    def rejected(self, reason: Refusal) -> None:
        self._rejected.labels(reason.value).inc()

    def ended(self, outcome: Outcome, sequence: Sequence, now: float) -> None:
        """A request's end, and its latencies if it ended well."""
        if outcome not in WELL:
            self._failed.labels(outcome.value).inc()
            return
        self._success.labels(outcome.value).inc()
        self._e2e.observe(now - sequence.arrival)
        if sequence.first_token:
            self._queue.observe(sequence.admitted - sequence.arrival)
            self._prefill.observe(sequence.first_token - sequence.admitted)
            self._decode.observe(now - sequence.first_token)
            self._ttft.observe(sequence.first_token - sequence.arrival)


class _Scrape:
    """Gauges, which are read, not fed."""

    def __init__(self, prefix: str, source: Source) -> None:
        self._prefix = prefix
        self._source = source

    def collect(self) -> Iterator[Metric]:
        status = self._source.status()
        pages = status.pages
        gauges = {
            "num_requests_running": ("Sequences running.", status.running),
            "num_requests_waiting": ("Sequences waiting.", status.waiting),
            "kv_cache_usage_perc": (
                "Share of the K/V pages that requests own, 0 to 1.",
                pages.owned / (pages.total or 1),
            ),
            "frontends": ("Frontends that are connected.", len(status.frontends)),
            "worker_epoch": ("Which incarnation of the worker this is.", status.epoch),
            "worker_last_step_age_seconds": ("Since the compute loop last turned.", status.last_step_age_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(self._prefix + name, text, value=float(value))
