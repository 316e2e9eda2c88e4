"""One request's life without HTTP: submit, follow, detokenize, stop, end; and all the requests of this process.

Knows tokens and text; knows neither an API format nor a socket. `Service.start` makes `len(prompts) * n` sequences of a
`GenerationRequest`, all admitted or none, and returns a `Generation`. That gives lists of Deltas, one list for all that
arrived at once: a client that reads slowly, or a busy loop, makes the pieces larger and not more.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from frontend.errors import DeadlineExceeded, Internal, Overloaded, SluiceError
from frontend.generation.choice import Choice
from frontend.request import Delta, Finish, GenerationRequest
from frontend.text.detokenizer import OutputText
from frontend.text.stop_strings import Stops
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING, Readiness, not_ready
from frontend.workers.stream import Batch, Stream, ignore
from shared.messages import End, Outcome, Sampling

DRAINING_S = 5.0  # until another server may have taken over
HANDSHAKE_S = 0.5  # for a worker that may be ready at any moment
POLL_S = 0.02  # how often it is looked whether that is so, and whether a drain's last request has ended


class RequestMetrics:
    """What the service reports about its requests, in under a microsecond a call; this one keeps nothing."""

    def admitted(self, prompt_tokens: int) -> None: ...
    def first_tokens(self, seconds: float, tokens: int) -> None: ...
    def next_tokens(self, seconds: float, tokens: int) -> None: ...
    def finished(self, finish: Finish, seconds: float) -> None: ...
    def aborted(self, reason: str) -> None: ...


class Service:
    """Starts requests and knows which are alive."""

    def __init__(
        self, fleet: WorkerPool, tokenizer: asyncio.Future[Tokenizer], meter: RequestMetrics | None = None
    ) -> None:
        self.fleet = fleet
        self.meter = meter or RequestMetrics()
        self.generations: set[Generation] = set()
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
        readiness, welcome = self.fleet.membership.readiness, self.fleet.membership.welcome
        hash = welcome.tokenizer_hash if welcome else ""
        if readiness.ready and hash and hash != self._tokenizer.result().hash:
            return not_ready("the worker has another tokenizer")
        return readiness

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises Overloaded until it is loaded."""
        if not self._tokenizer.done() or self._tokenizer.cancelled() or self._tokenizer.exception() is not None:
            raise Overloaded(f"not ready: {self.readiness.text}", code="not_ready", retry_after=1.0)
        return self._tokenizer.result()

    async def wait_for_handshake(self) -> None:
        """Waits, for HANDSHAKE_S at most, while the tokenizer loads or the handshake with the workers goes on: another
        frontend of the same port may be ready already and have answered so.

        Raises:
            Overloaded: requests still cannot be served.
        """
        deadline = time.monotonic() + HANDSHAKE_S
        while not self.draining and (not self._tokenizer.done() or self.fleet.membership.handshaking):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        self._check_ready()

    def _check_ready(self) -> None:
        readiness = self.readiness
        if not readiness.ready:
            retry_after = DRAINING_S if readiness.code == DRAINING.code else 1.0
            raise Overloaded(f"not ready: {readiness.text}", code=readiness.code, retry_after=retry_after)

    async def start(self, request: GenerationRequest, begun: float | None = None) -> "Generation":
        """Returns when all are admitted. `begun`: when the request came, by `time.perf_counter()` (None: now).

        Raises:
            Overloaded, Unprocessable: one of them was refused; those already admitted are aborted.
            DeadlineExceeded: its `deadline_ms`, which count from `begun`, passed before.
        """
        self._check_ready()
        begun = time.perf_counter() if begun is None else begun
        streams = await self._submit_in_time(request, begun)
        self.meter.admitted(sum(map(len, request.prompts)))
        stops = Stops(request.stops) if request.stops else None
        choices = [
            Choice(index, request, stream, OutputText(self.tokenizer.detokenizer(), stops))
            for index, stream in enumerate(streams)
        ]
        if request.echo:
            for choice in choices:
                choice.echo(OutputText(self.tokenizer.detokenizer()))
        generation = Generation(self, choices, begun)
        if request.deadline_ms:
            generation.end_in(_time_left(request, begun))
        return generation

    async def _submit_in_time(self, request: GenerationRequest, begun: float) -> list[Stream]:
        if not request.deadline_ms:
            return await self._submit(request)
        left = _time_left(request, begun)
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self._submit(replace(request, deadline_ms=math.ceil(1e3 * left)))
        for _ in range(len(request.prompts) * request.n):
            self.meter.aborted("deadline_exceeded")
        raise _late()

    async def _submit(self, request: GenerationRequest) -> list[Stream]:
        calls = [
            self.fleet.submit(
                prompt, _sampling(request.sampling, n), cache_salt=request.cache_salt, group=group,
                deadline_ms=request.deadline_ms, priority=request.priority, tenant=request.tenant,
            )
            for prompt, group in zip(request.prompts, self._group_ids(request), strict=True)
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
            self.fleet.abort([task.result() for task in done if task.exception() is None])
            raise

    def _group_ids(self, request: GenerationRequest) -> list[int]:
        return [next(self._groups) if request.n > 1 else 0 for _ in request.prompts]

    async def drain(self, timeout: float) -> None:
        """Admit nothing more, let what runs finish within `timeout` seconds, then end the rest with an error."""
        self.draining = True
        end = time.monotonic() + timeout
        while self.generations and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        for generation in list(self.generations):
            generation.fail(Overloaded("the server is shutting down", code="shutdown", retry_after=1.0))


class Generation:
    """An admitted request. Poll it, or iterate over `deltas()`, once; `close()` it in any case.

    `on_ready` and `poll` need no task: a stream (frontend/server/sse.py) is called back, and polls. `deltas()` awaits
    the same polls, for complete responses and the Python API.
    """

    def __init__(self, service: Service, choices: list[Choice], begun: float) -> None:
        self._service = service
        self.choices = choices  # choice `i` belongs to prompt `i // n`
        self._begun = begun
        self.ended = False  # the last `poll` returned the last deltas
        self.error: SluiceError | None = None  # why it ended without success
        self.reason = ""  # why it was closed before every choice had its finish
        self._failure: SluiceError | None = None  # what `fail` was called with
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._open = len(choices)  # choices that are not done
        self._scheduled = False  # the loop will call `_notify`
        self._callback: Callable[[], None] = ignore
        service.generations.add(self)

    def end_in(self, seconds: float) -> None:
        """Fails it if it has not ended by then, whatever has become of its worker."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, _late())

    def fail(self, error: SluiceError) -> None:
        """Ends the request with this error, at once."""
        self._failure = error
        self._service.fleet.abort([choice.stream for choice in self.choices])

    def close(self, reason: str = "client") -> None:
        """Idempotent and immediate. Aborts every choice that has not ended, and counts it under `reason`."""
        if self not in self._service.generations:
            return
        self._service.generations.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        live = [choice for choice in self.choices if not choice.done]
        if not all([choice.finish for choice in self.choices]):
            self.reason = reason
        self._service.fleet.abort([choice.stream for choice in live])
        for _ in live:
            self._service.meter.aborted(reason)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Has the event loop call `callback` in its next turn, and then after each arrival."""
        self._callback = callback
        for choice in self.choices:
            choice.stream.on_fresh = self._schedule_notify
        self._schedule_notify()

    def _schedule_notify(self) -> None:
        """Notifies once in a turn of the loop, however much arrives."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._scheduled = False
        self._callback()

    def poll(self) -> list[Delta]:
        """All deltas since the last call, perhaps none. Sets `ended` with the last ones, and closes the generation.

        It has ended when every choice has its finish, or when one failed: then `error` says why.
        """
        now = time.perf_counter()
        deltas: list[Delta] = []
        failed: End | None = None
        for choice in self.choices:
            if choice.done or not choice.stream.fresh:
                continue
            batch = choice.stream.gather()
            if batch.tokens:
                self._measure(choice, len(batch.tokens), now)
            delta = choice.take(batch)
            if delta is not None:
                deltas.append(delta)
            if choice.done:
                self._open -= 1
                if choice.finish is not None:
                    self._finished(choice, batch, now)
                else:
                    failed = batch.end
        if failed is not None:
            self._end_with(self._failure or error_of(failed), failed)
        elif not self._open:
            self.ended = True
            self.close()
        return deltas

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """Awaits each list of deltas that is not empty.

        Raises:
            SluiceError: a choice failed; its last deltas have been yielded before.
        """
        ready = asyncio.Event()
        self.on_ready(ready.set)
        try:
            while not self.ended:
                await ready.wait()
                ready.clear()
                if deltas := self.poll():
                    yield deltas
        except GeneratorExit:
            self.close()
            raise
        if self.error is not None:
            raise self.error

    def _end_with(self, error: SluiceError, end: End) -> None:
        self.ended = True
        self.error = error
        reason = error.code or end.outcome.value
        self._service.meter.aborted(reason)
        self.close(reason)

    def _measure(self, choice: Choice, tokens: int, now: float) -> None:
        if choice.last_at:
            self._service.meter.next_tokens(now - choice.last_at, tokens)
        else:
            self._service.meter.first_tokens(now - self._begun, tokens)
            choice.first_at = now
        choice.last_at = now

    def _finished(self, choice: Choice, batch: Batch, now: float) -> None:
        if batch.end is None:
            self._service.fleet.abort([choice.stream])
            self._service.meter.aborted("stop")
        self._service.meter.finished(choice.finish or Finish.STOP, now - self._begun)


def _time_left(request: GenerationRequest, begun: float) -> float:
    """Seconds."""
    return begun + request.deadline_ms / 1e3 - time.perf_counter()


def _late(message: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(message or "the request's deadline has passed", code="deadline_exceeded")


def _sampling(sampling: Sampling, n: int) -> Sampling:
    """Choices of one prompt differ by their seed: the given one, and those that follow it."""
    if sampling.seed is None or n == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + n) % (1 << 64))


def error_of(end: End) -> SluiceError:
    """What a client is told about an end that is no success."""
    match end.outcome:
        case Outcome.DEADLINE:
            return _late(end.error)
        case Outcome.SHUTDOWN:
            return Overloaded(end.error or "the server is shutting down", code="shutdown", retry_after=1.0)
        case Outcome.ABORTED:
            return Internal(end.error or "the request was aborted by the server", code="aborted")
        case _:
            return Internal(end.error or "the worker failed", code="worker_error")
