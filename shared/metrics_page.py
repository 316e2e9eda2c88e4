"""Makes the metrics pages of frontends and workers: adds the labels that every series has, and `sluice_build_info`.

A page is made of collectors of prometheus-client. Series get their common labels when the page is read, so the code
that counts need not know these labels.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram, values
from prometheus_client.core import GaugeMetricFamily, Metric

from shared.build import commit, version

MODEL_LABEL = "model_name"  # the first name that a model is served as
BUILD_INFO = "sluice_build_info"  # has no --metrics-prefix, so this name shows that the server is Sluice


class Collector(Protocol):
    """A registry, or anything that can be registered in a registry."""

    def collect(self) -> Iterable[Metric]: ...


@dataclass(frozen=True)
class Naming:
    """How another server names labels and finish reasons in its metrics, as its dashboards expect."""

    labels: Mapping[str, str] = field(default_factory=dict)  # the labels of every series
    reasons: Mapping[str, str] = field(default_factory=dict)  # our `finished_reason` → the other server's

    def reason(self, ours: str) -> str:
        return self.reasons.get(ours, ours)


# vLLM numbers the engines of a process, and has one finish reason for all complete answers.
NAMINGS = {"vllm:": Naming({"engine": "0"}, {"eos": "stop", "pooled": "stop", "checked": "stop"})}


def naming(prefix: str) -> Naming:
    """Returns the Naming for a --metrics-prefix."""
    return NAMINGS.get(prefix, Naming())


class MetricsPage:
    """All metrics that one process exports.

    model_name: the name under which the model is served; a label of every series, unless empty
    packages: the packages whose versions `sluice_build_info` states
    """

    def __init__(self, sources: Sequence[Collector], prefix: str, model_name: str, packages: Sequence[str]) -> None:
        versions = {"version": version(), "commit": commit(), "python": platform.python_version()}
        versions |= {package: version(package) for package in packages}
        self._sources = [*sources, _Build(versions)]
        self._labels = {**({MODEL_LABEL: model_name} if model_name else {}), **naming(prefix).labels}

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for family in source.collect():
                samples = family.samples
                family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in samples]
                yield family

    def registry(self) -> CollectorRegistry:
        """Returns a registry that holds only this page."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry


class _Build:
    def __init__(self, versions: Mapping[str, str]) -> None:
        self._versions = versions

    def collect(self) -> Iterator[Metric]:
        names, values = [*self._versions], [*self._versions.values()]
        build = GaugeMetricFamily(BUILD_INFO, "Always 1; the labels are the versions that run.", labels=names)
        build.add_metric(values, 1.0)
        yield build


# Uses undocumented names of prometheus-client. The test of this module states the version they were checked with.


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
