"""The metrics of draft tokens by position: how many were computed, and how many were accepted."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric


class Drafts(Protocol):
    """Counts of drafts by their position among the drafts of a step (worker/schedule/features/speculation.py)."""

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
