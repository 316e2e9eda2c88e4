"""Reports in a running stream: the usage so far, and the worker's times up to the first token."""

from frontend.generation.choice import Choice
from frontend.request import Delta, Shown


class Progress:
    """Adds the usage to every delta and the times to the first delta, if the request asks for them."""

    def __init__(self, shown: Shown) -> None:
        self._usage, self._start = shown.continuous_usage, shown.telemetry is not None

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if delta.finish is not None or not (delta.ids or delta.texts):
            return
        if self._usage:
            delta.usage = choice.usage()
        if self._start:
            delta.timings, self._start = choice.timings(None), False
