"""A request with many prompts, which are submitted a few at a time so that they fit in a worker's queue.

A request that generates text is admitted as a whole, before its response begins. A request for vectors or
log-probabilities is answered only when all its prompts are computed, so it may also be refused halfway.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace

from frontend.generation.choice import Choice
from frontend.generation.service import Service
from frontend.request import Delta, GenerationRequest

WINDOW = 256  # prompts submitted at a time; the default of --max-waiting-requests leaves room for several windows


class Windows:
    """Runs the generations of a request, one after the other.

    Each has the next WINDOW prompts, or fewer if the workers have less room.

    choices, reason: the same as in a Generation, for all generations that have begun
    fingerprint: the workers' fingerprint, the same for all prompts; empty before the first prompts are admitted
    """

    def __init__(self, service: Service, request: GenerationRequest, arrived_at: float) -> None:
        """arrived_at: when the request arrived, by `time.perf_counter()`"""
        self.choices: list[Choice] = []
        self.reason = ""
        self.fingerprint = ""
        self._service, self._request, self._arrived_at = service, request, arrived_at

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """Yields the deltas of all prompts. Raises SluiceError when a prompt is refused or fails."""
        prompts = self._request.prompts
        size = min(WINDOW, self._service.pool.places() or WINDOW)
        for first in range(0, len(prompts), size):
            at = slice(first, first + size)
            window = _window(self._request, at).admitted(fingerprint=self.fingerprint)
            generation = await self._service.start(window, self._arrived_at)
            self.fingerprint = generation.fingerprint
            self.choices += generation.choices
            try:
                async for deltas in generation.deltas():
                    for delta in deltas:
                        delta.index += first
                    yield deltas
            finally:
                generation.close()
                self.reason = generation.reason


def _window(request: GenerationRequest, at: slice) -> GenerationRequest:
    """Returns the request with only the prompts `at`."""
    features = request.features
    if features.scored is not None:
        features = replace(features, scored=replace(features.scored, starts=features.scored.starts[at]))
    return replace(request, prompts=request.prompts[at], features=features)
