"""Counts for each rank how often it had wrong numbers. The worker then ends, and the next worker shows the count."""

from prometheus_client import Counter

from shared.config import Settings
from worker.ranks.checks import RankDiffers


class RankCounter:
    """Holds the Prometheus counter. Make it before the weights are loaded, because ranks are compared from then on."""

    def __init__(self, settings: Settings) -> None:
        self.counter = Counter(
            settings.frontend.metrics_prefix + "ranks_differed", "Times that a rank had wrong numbers.",
            ["rank"], registry=None,
        )  # fmt: skip
        for rank in range(settings.worker.ranks):
            self.counter.labels(rank)

    def count(self, error: BaseException | None) -> None:
        """Counts the error that made the worker end, if a rank with wrong numbers caused it."""
        while error is not None and not isinstance(error, RankDiffers):
            error = error.__cause__
        if error is not None:
            self.counter.labels(error.rank).inc()
