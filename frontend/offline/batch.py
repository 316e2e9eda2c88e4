"""Many requests through one service: as many at a time as keep its worker busy, and patient when it is full.

Knows Asks and Deltas; knows neither threads nor processes. Runs on the service's own event loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from frontend.api.common import ModelContext
from frontend.errors import Overloaded
from frontend.generation.service import Generation, Service
from frontend.offline.inputs import Read
from frontend.offline.loop_thread import Put, Work
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from shared.messages import Refusal, Timings

Take = Callable[[int, Delta], None]

FULL = frozenset({Refusal.QUEUE_FULL.value})  # passes as soon as one of those that run ends
AWAY = frozenset({Refusal.DRAINING.value, "not_ready", "worker_lost"})  # passes when the worker is back
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer. `text` ends where a stop string began; `ids` hold the tokens that completed it, too."""

    text: str
    ids: tuple[int, ...]
    finish: Finish  # a str: "eos", "stop" or "length"
    usage: Usage
    seed: int  # asks for the same answer again
    stop: str | int | None = None  # the stop string or id that ended it
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per id
    timings: Timings = field(default_factory=Timings)


async def follow(
    service: Service, requests: Sequence[GenerationRequest], take: Take, *, width: int, patience: float = 120.0
) -> None:
    """Runs all of `asks`, each of one prompt and one choice, `width` at a time in their order.

    `take(i, delta)` gets what the answer to `asks[i]` gains. A full queue is waited for without limit, a worker that
    is away `patience` seconds. Raises the first SluiceError; then, as when cancelled, the others are aborted.
    """
    jobs = iter(enumerate(requests))
    hands = [asyncio.create_task(_work(service, jobs, take, patience)) for _ in range(min(width, len(requests)))]
    try:
        await asyncio.gather(*hands)
    finally:
        for hand in hands:
            hand.cancel()
        await asyncio.gather(*hands, return_exceptions=True)


async def _work(service: Service, jobs: Iterator[tuple[int, GenerationRequest]], take: Take, patience: float) -> None:
    for index, request in jobs:
        generation = await _admitted(service, request, patience)
        try:
            async for deltas in generation.deltas():
                for delta in deltas:
                    take(index, delta)
        finally:
            generation.close()


async def _admitted(service: Service, request: GenerationRequest, patience: float) -> Generation:
    pause, away_since = FIRST_PAUSE_S, 0.0
    while True:
        try:
            return await service.start(request)
        except Overloaded as refusal:
            now = time.monotonic()
            if refusal.code in AWAY:
                away_since = away_since or now
                if now - away_since > patience:
                    raise
            elif refusal.code in FULL:
                away_since = 0.0
            else:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


class Answers:
    """Folds deltas into answers; `done(i, answer)` is called when answer `i` is whole."""

    def __init__(self, done: Callable[[int, Answer], None]) -> None:
        self._done = done
        self._parts: dict[int, list[Delta]] = {}

    def take(self, index: int, delta: Delta) -> None:
        self._parts.setdefault(index, []).append(delta)
        if delta.finish is not None:
            self._done(index, _fold(self._parts.pop(index), delta.finish))


def _fold(parts: list[Delta], finish: Finish) -> Answer:
    last = parts[-1]
    scored = last.logprobs is not None
    return Answer(
        text="".join([part.text for part in parts]),
        ids=tuple([token for part in parts for token in part.ids]),
        finish=finish,
        usage=last.usage or Usage(0, 0),
        seed=last.seed or 0,
        stop=last.stop,
        logprobs=tuple([score for part in parts for score in part.logprobs or ()]) if scored else None,
        timings=last.timings or Timings(),
    )


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """A service that is ready, and what must be known to ask it."""

    service: Service
    context: ModelContext
    width: int = 128  # requests that are on their way at a time
    patience: float = 120.0  # seconds for which a worker that is away is waited for

    def texts(self, read: Read) -> Work[tuple[int, str]]:
        """What each answer's text gains, as it comes."""

        async def work(put: Put[tuple[int, str]]) -> None:
            def take(index: int, delta: Delta) -> None:
                if text := delta.text:
                    put((index, text))

            await self._run(read, take)

        return work

    def answers(self, read: Read) -> Work[tuple[int, Answer]]:
        """Each answer when it is whole."""

        async def work(put: Put[tuple[int, Answer]]) -> None:
            await self._run(read, Answers(lambda index, answer: put((index, answer))).take)

        return work

    async def _run(self, read: Read, take: Take) -> None:
        requests = await read(self.context)
        await follow(self.service, requests, take, width=self.width, patience=self.patience)
