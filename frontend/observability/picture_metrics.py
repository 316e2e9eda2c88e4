"""A frontend's metrics of the pictures in requests."""

from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("decoded", "refused", "not_decoded")


class PictureMetrics:
    """The Prometheus metrics of pictures."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        pictures = Counter(
            prefix + "pictures", "Pictures given to a process that decodes", ["outcome"], registry=registry
        )
        self._outcomes = {outcome: pictures.labels(outcome) for outcome in OUTCOMES}
        text = "Time that pictures waited for a process that decodes, and were decoded in it"
        self._seconds = Counter(prefix + "picture_decode_seconds", text, registry=registry)

    def flush(self) -> None:
        """Carries the counts since the last call over to prometheus-client."""
        counts = picture_counts()
        for outcome in OUTCOMES:
            self._outcomes[outcome].inc(getattr(counts, outcome))
        self._seconds.inc(counts.seconds)
        counts.clear()


@dataclass(slots=True)
class PictureCounts:
    """Counts since the last flush.

    refused: files that are no picture, or that the server does not accept
    not_decoded: files that were not decoded for a reason outside the file, such as a child that did not start
    seconds: time that all files waited for a child process and were decoded in it
    """

    decoded: int = 0
    refused: int = 0
    not_decoded: int = 0
    seconds: float = 0.0

    def clear(self) -> None:
        self.decoded = self.refused = self.not_decoded = 0
        self.seconds = 0.0


@cache
def picture_counts() -> PictureCounts:
    """Returns the counts of this process: all its models share the child processes that decode."""
    return PictureCounts()
