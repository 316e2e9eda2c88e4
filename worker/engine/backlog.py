"""Estimates when a worker with a full queue can take requests again."""

from worker.observability.stats import Stats
from worker.schedule.scheduler import Scheduler

MAX_SECONDS = 120.0


class Backlog:
    """Estimates how long this worker needs for the tokens that its live requests still have to compute."""

    def __init__(self, scheduler: Scheduler, stats: Stats) -> None:
        self._scheduler, self._stats = scheduler, stats
        self._estimated, self._seconds = -1.0, 1.0  # the time of the last estimate, and its result

    def seconds(self, now: float) -> float:
        """Returns how many seconds, at least 1, the backlog takes at the measured speed. Computed once per `now`."""
        if self._estimated != now:
            live = self._scheduler.sequences()
            outputs = sum(sequence.sampling.max_tokens - sequence.output_len for sequence in live)
            tokens, speed = self._scheduler.status.waiting_tokens + outputs, self._stats.speed.per_second()
            self._estimated, self._seconds = now, min(MAX_SECONDS, max(1.0, tokens / speed)) if speed else 1.0
        return self._seconds
