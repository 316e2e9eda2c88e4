"""Runs many requests through one service: enough at a time to keep its worker busy. Waits while the worker is full.

Knows GenerationRequests and Deltas; knows neither threads nor processes. Runs on the service's own event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from deploy.offline.inputs import ContextOf, Contexts, Prompt, ReadRequests
from deploy.offline.loop_thread import Emit, Job, TextPiece
from frontend.api.formats import API_FORMATS
from frontend.api.pooling import embeddings, relevance
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import Vectors
from frontend.api.pooling.relevance import Pairs, RelevanceFields, relevance_request
from frontend.api.verification import VerifyRequest, read_claim
from frontend.errors import BadRequest, Overloaded
from frontend.generation.generation import Generation
from frontend.generation.service import Service
from frontend.model_context import check_task
from frontend.output_parser.model_format import spelled
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.schema.decoding import convert
from shared.messages import Refusal, Timings

# Vectors and scores for a Python caller, with the HTTP API's own checks.

ReadRequest = Callable[[ContextOf], Awaitable[GenerationRequest]]


def embedding_reader(
    prompts: Sequence[Prompt], dimensions: int | None, prompt_name: str | None, adapter: str | None
) -> ReadRequest:
    """Returns a function that makes the request for the prompts' vectors. That function raises SluiceError."""

    async def read(context_of: ContextOf) -> GenerationRequest:
        context = context_of(adapter)
        check_task("`embed`", embeddings.TASKS, context)
        return await embedding_request(
            RelevanceFields(), prompts, context, dimensions=dimensions or 0, prompt_name=prompt_name
        )

    return read


def score_reader(
    text_1: str | Sequence[str], text_2: str | Sequence[str], instruction: str | None, adapter: str | None
) -> ReadRequest:
    """Returns a function that makes the request for the scores of pairs. That function raises SluiceError."""
    first, second = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))

    async def read(context_of: ContextOf) -> GenerationRequest:
        context = context_of(adapter)
        check_task("`score`", relevance.TASKS, context)
        if len(first) not in (1, len(second)) or not all([*first, *second]):
            raise BadRequest("`text_1` is one text, or as many as `text_2`; no text may be empty", param="text_1")
        pairs = Pairs(first, second, "text_1", "text_2")
        return await relevance_request(RelevanceFields(instruction=instruction), pairs, context)

    return read


def one_by_one(request: GenerationRequest) -> list[GenerationRequest]:
    """Returns a request for each prompt."""
    return [replace(request, prompts=(ids,)) for ids in request.prompts]


def scores(request: GenerationRequest, packed: list[bytes]) -> list[float]:
    """Computes the scores of a request from the vectors of its prompts."""
    return relevance.scores_of(request, Vectors(packed, Usage(0, 0)))


OnDelta = Callable[[int, Delta], None]  # called with the index of the request, and its next delta
FULL = frozenset({Refusal.QUEUE_FULL.value})  # refusals that pass when a running request ends
UNAVAILABLE = frozenset({Refusal.DRAINING.value, "not_ready", "worker_lost"})  # refusals until a worker is back
FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished output. `text` ends before a stop string, but `ids` include the tokens that completed the string."""

    text: str
    ids: tuple[int, ...]
    finish: Finish  # a str: "eos", "stop" or "length"
    usage: Usage
    seed: int  # the same request with this seed gets the same output
    stop: str | int | None = None  # the stop string or id that ended the output
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per id
    timings: Timings = field(default_factory=Timings)


async def run_all(
    service: Service,
    requests: Sequence[GenerationRequest],
    on_delta: OnDelta,
    *,
    concurrency: int,
    recovery_timeout: float = 120.0,
) -> None:
    """Runs all `requests` in order; each has one prompt and one choice.

    on_delta: called with the index of a request and each of its deltas
    concurrency: how many requests run at a time
    recovery_timeout: seconds to wait for a worker that is unavailable; the wait for a full queue has no limit

    Raises the first SluiceError. All other requests are aborted then, or when this function is cancelled.
    """
    queue = iter(enumerate(requests))
    tasks = [
        asyncio.create_task(_run_queue(service, queue, on_delta, recovery_timeout))
        for _ in range(min(concurrency, len(requests)))
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_queue(
    service: Service, queue: Iterator[tuple[int, GenerationRequest]], on_delta: OnDelta, recovery_timeout: float
) -> None:
    for index, request in queue:
        generation = await _start(service, request, recovery_timeout)
        try:
            async for deltas in generation.deltas():
                for delta in deltas:
                    on_delta(index, delta)
        finally:
            generation.close()


async def _start(service: Service, request: GenerationRequest, recovery_timeout: float) -> Generation:
    """Starts a request; waits as long as the workers refuse it for a reason that passes."""
    pause, unavailable_since = FIRST_PAUSE_S, 0.0
    while True:
        try:
            return await service.start(request)
        except Overloaded as refusal:
            now = time.monotonic()
            if refusal.code in UNAVAILABLE:
                unavailable_since = unavailable_since or now
                if now - unavailable_since > recovery_timeout:
                    raise
            elif refusal.code in FULL:
                unavailable_since = 0.0
            else:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


class Answers:
    """Collects deltas into answers; `on_answer(i, answer)` is called when answer `i` is complete."""

    def __init__(self, on_answer: Callable[[int, Answer], None]) -> None:
        self._on_answer = on_answer
        self._deltas: dict[int, list[Delta]] = {}

    def add(self, index: int, delta: Delta) -> None:
        self._deltas.setdefault(index, []).append(delta)
        if delta.finish is not None:
            self._on_answer(index, _answer(self._deltas.pop(index), delta.finish))


def _answer(deltas: list[Delta], finish: Finish) -> Answer:
    last = deltas[-1]
    has_logprobs = last.logprobs is not None
    return Answer(
        text=spelled("".join([delta.text for delta in deltas])),
        ids=tuple([token for delta in deltas for token in delta.ids]),
        finish=finish,
        usage=last.usage or Usage(0, 0),
        seed=last.seed or 0,
        stop=last.stop,
        logprobs=tuple([entry for delta in deltas for entry in delta.logprobs or ()]) if has_logprobs else None,
        timings=last.timings or Timings(),
    )


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Runs requests on a service that is ready.

    concurrency: how many requests run at a time
    recovery_timeout: seconds to wait for a worker that is unavailable
    """

    service: Service
    contexts: Contexts
    concurrency: int = 128
    recovery_timeout: float = 120.0

    def texts(self, read: ReadRequests) -> Job[TextPiece]:
        """Returns a job that emits the pieces of each output's text as they arrive."""

        async def job(emit: Emit[TextPiece]) -> None:
            def on_delta(index: int, delta: Delta) -> None:
                if text := spelled(delta.text):
                    emit((index, text))

            await self._run(read, on_delta)

        return job

    def answers(self, read: ReadRequests) -> Job[tuple[int, Answer]]:
        """Returns a job that emits each answer when it is complete."""

        async def job(emit: Emit[tuple[int, Answer]]) -> None:
            await self._run(read, Answers(lambda index, answer: emit((index, answer))).add)

        return job

    def vectors(self, read: ReadRequest) -> Job[tuple[GenerationRequest, list[bytes]]]:
        """Returns a job that reads a request, and emits it with the vectors of its prompts, as packed float32."""

        async def job(emit: Emit[tuple[GenerationRequest, list[bytes]]]) -> None:
            request = await read(self.contexts.of)
            packed = [b""] * len(request.prompts)

            def on_delta(index: int, delta: Delta) -> None:
                packed[index] = delta.extras.vector

            await self._run_all(one_by_one(request), on_delta)
            emit((request, packed))

        return job

    def verification(self, asked: Mapping[str, Any]) -> Job[dict[str, Any]]:
        """Returns a job that checks the receipt of a request, and emits the answer of `/v1/receipts/verify`."""

        async def job(emit: Emit[dict[str, Any]]) -> None:
            membership = self.service.pool.membership
            request = convert(asked, VerifyRequest)
            context = self.contexts.of_model(request.receipt.model)
            claim = await read_claim(request, context, membership.fingerprints, API_FORMATS)
            arriving, worker = None, membership.fingerprint
            if claim.generation is not None:
                generation = await _start(self.service, claim.generation, self.recovery_timeout)
                arriving, worker = generation.deltas(), generation.fingerprint
            emit(msgspec.to_builtins(await claim.verdict(arriving, context.fingerprint_with(worker), None)))

        return job

    async def _run(self, read: ReadRequests, on_delta: OnDelta) -> None:
        await self._run_all(await read(self.contexts.of), on_delta)

    async def _run_all(self, requests: Sequence[GenerationRequest], on_delta: OnDelta) -> None:
        await run_all(
            self.service, requests, on_delta, concurrency=self.concurrency, recovery_timeout=self.recovery_timeout
        )
