"""Uses undocumented names of prometheus-client. The test of this module states the version they were checked with."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, values


class BulkHistogram(Histogram):
    """A histogram that takes many observations at once. The `observe` of prometheus-client takes only one."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds `counts[i]` observations to bucket i (the last is +Inf); the sum of their values is `total`."""
        for value, count in zip(self._buckets, counts, strict=True):
            if count:
                value.inc(count)
        if total:
            self._sum.inc(total)


def name_process(name: str) -> None:
    """Names the files of this process's values after `name` instead of the process id. Call it before making metrics.

    The next process with this name continues the values. A process id could be reused by an unrelated process.
    """
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def declared_labels(registry: CollectorRegistry) -> Mapping[str, Sequence[str]]:
    """Returns the label names of each metric family, including families without samples."""
    return {
        name: getattr(collector, "_labelnames", ())
        for collector, names in registry._collector_to_names.items()
        for name in names
    }
