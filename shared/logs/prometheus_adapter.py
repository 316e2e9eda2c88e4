"""Uses names that prometheus-client does not document. The test says which version they were checked with."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, values


class BulkHistogram(Histogram):
    """A histogram that also takes many observations at once: `observe` takes one, and looks for its bucket."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds `counts[i]` observations to bucket i (the last is +Inf); the sum of their values is `total`."""
        for value, count in zip(self._buckets, counts, strict=True):
            if count:
                value.inc(count)
        if total:
            self._sum.inc(total)


def name_process(name: str) -> None:
    """Names the files that hold this process's values after `name` instead of its id. Call it before making metrics.

    The next process of this name continues the values. A process id would not do: another process may get it.
    """
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def declared_labels(registry: CollectorRegistry) -> Mapping[str, Sequence[str]]:
    """Returns the label names of each metric family, including families without samples."""
    return {
        name: getattr(collector, "_labelnames", ())
        for collector, names in registry._collector_to_names.items()
        for name in names
    }
