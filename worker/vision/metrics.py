"""Metrics of pictures: how many were encoded, how many seconds that took, and how many were found in the cache."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from worker.vision.vision import Vision


class VisionCollector:
    """Makes the metrics at each scrape."""

    def __init__(self, prefix: str, vision: Vision) -> None:
        self._prefix, self._vision = prefix, vision

    def collect(self) -> Iterator[Metric]:
        prefix, vision = self._prefix, self._vision
        yield CounterMetricFamily(prefix + "pictures_encoded", "Pictures and tiles encoded.", value=vision.encoded)
        yield CounterMetricFamily(
            prefix + "picture_encode_seconds", "Time spent encoding pictures.", value=vision.seconds
        )
        yield CounterMetricFamily(
            prefix + "encoder_cache_hits", "Pictures and tiles that a step found encoded.", value=vision.hits
        )
        yield GaugeMetricFamily(
            prefix + "encoder_cache_bytes", "Size of the encoded pictures in memory.", value=vision.cached_bytes
        )
