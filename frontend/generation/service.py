"""All requests of this process: submits their sequences, and knows which requests are alive.

Knows tokens and text; knows neither an API format nor a socket. `Service.start` makes `len(prompts) * n` sequences of a
`GenerationRequest`, all admitted or none, and returns a `Generation`.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from frontend.errors import Overloaded
from frontend.generation.choice import Choice
from frontend.generation.generation import Generation, RequestMetrics, deadline_error
from frontend.output_parser.parser import searched_text
from frontend.request import GenerationRequest
from frontend.text.detokenizer import OutputText
from frontend.text.stop_strings import Stops
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING, Readiness, not_ready
from frontend.workers.stream import Stream
from shared.messages import Sampling

DRAINING_RETRY_S = 5.0  # the Retry-After while draining: another server may have taken over by then
HANDSHAKE_S = 0.5  # how long a request waits for a worker that may be ready at any moment
POLL_S = 0.02  # how often it checks for the end of the handshake, or of the last request of a drain


class Service:
    """Starts requests, and knows which are alive."""

    def __init__(
        self, pool: WorkerPool, tokenizer: asyncio.Future[Tokenizer], metrics: RequestMetrics | None = None
    ) -> None:
        self.pool = pool
        self.metrics = metrics or RequestMetrics()
        self.generations: set[Generation] = set()  # those that are not closed
        self.draining = False
        self._tokenizer = tokenizer
        self._groups = itertools.count(1)

    @property
    def readiness(self) -> Readiness:
        """Whether requests can be served now and, if not, why."""
        if self.draining:
            return DRAINING
        if not self._tokenizer.done():
            return not_ready("loading the tokenizer")
        if self._tokenizer.cancelled() or self._tokenizer.exception() is not None:
            return not_ready("the tokenizer did not load")
        readiness, welcome = self.pool.membership.readiness, self.pool.membership.welcome
        hash = welcome.tokenizer_hash if welcome else ""
        if readiness.ready and hash and hash != self._tokenizer.result().hash:
            return not_ready("the worker has another tokenizer")
        return readiness

    @property
    def has_tokenizer(self) -> bool:
        loading = self._tokenizer
        return loading.done() and not loading.cancelled() and loading.exception() is None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises Overloaded until it is loaded."""
        if not self.has_tokenizer:
            raise Overloaded(f"not ready: {self.readiness.text}", code="not_ready", retry_after=1.0)
        return self._tokenizer.result()

    async def wait_for_handshake(self) -> None:
        """Waits, for HANDSHAKE_S at most, while the tokenizer loads or the handshake with the workers goes on.
        Another frontend on the same port may already have told the client that the server is ready.

        Raises:
            Overloaded: requests still cannot be served.
        """
        deadline = time.monotonic() + HANDSHAKE_S
        while not self.draining and (not self._tokenizer.done() or self.pool.membership.handshaking):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        self._check_ready()

    def _check_ready(self) -> None:
        readiness = self.readiness
        if not readiness.ready:
            retry_after = DRAINING_RETRY_S if readiness.code == DRAINING.code else 1.0
            raise Overloaded(f"not ready: {readiness.text}", code=readiness.code, retry_after=retry_after)

    async def start(self, request: GenerationRequest, arrived_at: float | None = None) -> "Generation":
        """Submits the sequences of a request, and returns when all are admitted.

        arrived_at: when the request arrived, by `time.perf_counter()`; None means now

        Raises:
            Overloaded, Unprocessable: a sequence was refused; those already admitted are aborted.
            DeadlineExceeded: `deadline_ms`, counted from `arrived_at`, passed before all were admitted.
        """
        self._check_ready()
        arrived_at = time.perf_counter() if arrived_at is None else arrived_at
        streams = await self._submit_in_time(request, arrived_at)
        self.metrics.admitted(request.prompt_tokens + len(request.answer or ()))
        stops, parser_config = Stops(request.stops) if request.stops else None, request.parser_config
        shown = self._shown_specials(request)
        texts = [
            OutputText(
                self.tokenizer.detokenizer(shown),
                stops,
                searched_text(parser_config),
                include_stop=request.includes_stop,
            )
            for _ in streams
        ]
        choices = [
            Choice(index, request, stream, text)
            for index, (stream, text) in enumerate(zip(streams, texts, strict=True))
        ]
        if request.echo:
            for choice in choices:
                choice.echo(OutputText(self.tokenizer.detokenizer()))
        generation = Generation(
            choices, self.pool, self.metrics, self.generations, arrived_at=arrived_at, generates=request.answer is None
        )
        if request.deadline_ms:
            generation.fail_after(_time_left(request, arrived_at))
        return generation

    def _shown_specials(self, request: GenerationRequest) -> dict[str, str]:
        """Returns the special tokens that the output's text has, and what stands for each."""
        marks = dict(request.parser_config.marks) if request.parser_config else {}
        if not request.shows_specials:
            return marks
        sampling, hidden = request.sampling, set[int]()
        if not request.includes_stop:
            hidden = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.tokenizer.eos_ids)}
        return self.tokenizer.specials_except(hidden) | marks

    async def _submit_in_time(self, request: GenerationRequest, arrived_at: float) -> list[Stream]:
        if not request.deadline_ms:
            return await self._submit(request)
        left = _time_left(request, arrived_at)
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self._submit(replace(request, deadline_ms=math.ceil(1e3 * left)))
        for _ in range(len(request.prompts) * request.n):
            self.metrics.aborted("deadline_exceeded")
        raise deadline_error()

    async def _submit(self, request: GenerationRequest) -> list[Stream]:
        single = len(request.prompts) == request.n == 1
        fingerprint = request.fingerprint or ("" if single else self.pool.fingerprint)
        calls = [
            self.pool.submit(
                prompt, _sampling(request.sampling, n), cache_salt=request.cache_salt, group=group,
                deadline_ms=request.deadline_ms, priority=request.priority, tenant=request.tenant,
                pooling=request.pooling, answer=request.answer, fingerprint=fingerprint, generated=request.continued,
                scored_from=start,
            )
            for prompt, group, start in zip(request.prompts, self._group_ids(request), _starts(request), strict=True)
            for n in range(request.n)
        ]  # fmt: skip
        if len(calls) == 1:
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in tasks]
        except BaseException:
            done = [task for task in tasks if task.done() and not task.cancelled()]
            self.pool.abort([task.result() for task in done if task.exception() is None])
            raise

    def _group_ids(self, request: GenerationRequest) -> list[int]:
        if request.one_group:
            return [next(self._groups)] * len(request.prompts)
        return [next(self._groups) if request.n > 1 else 0 for _ in request.prompts]

    async def drain(self, timeout: float) -> None:
        """Admits nothing more, lets requests finish within `timeout` seconds, then ends the others with an error.

        Requests that wait for a lost worker end at once.
        """
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.generations and time.monotonic() < deadline:
            self.pool.end_waiting()
            await asyncio.sleep(POLL_S)
        for generation in list(self.generations):
            generation.fail(Overloaded("the server is shutting down", code="shutdown", retry_after=1.0))


def _starts(request: GenerationRequest) -> Sequence[int]:
    """Returns for each prompt the index that it is scored from."""
    return request.scored_from or [0] * len(request.prompts)


def _time_left(request: GenerationRequest, arrived_at: float) -> float:
    """Returns the seconds until the request's deadline."""
    return arrived_at + request.deadline_ms / 1e3 - time.perf_counter()


def _sampling(sampling: Sampling, n: int) -> Sampling:
    """Returns the sampling of a prompt's choice `n`: its seed is the given seed plus `n`."""
    if sampling.seed is None or n == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + n) % (1 << 64))
