"""All requests of one model: submits their sequences, and keeps the set of running requests.

Knows tokens and text, but no API format and no socket. `Service.start` makes `len(prompts) * n` sequences of a
`GenerationRequest` and returns a `Generation`. Either all sequences are admitted, or none.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

import msgspec

from frontend.errors import Overloaded, Unprocessable
from frontend.generation.extras import extras_of
from frontend.generation.generation import Choice, Extra, Generation, RequestMetrics, deadline_error
from frontend.generation.prompt_places import Ask, PromptPlaces
from frontend.output_parser.parser import searched_text
from frontend.request import Delta, GenerationRequest
from frontend.text.detokenizer import OutputText
from frontend.text.stop_strings import Stops
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING, NO_TOKENIZER, Readiness, not_ready
from frontend.workers.stream import Stream
from shared.messages import Sampling
from shared.messages.requests import ids_in_lists
from shared.prefix_identity import PrefixIdentity

# The price of a request: what it would cost in memory and time, computed before any message to a worker is made.
#
# A field has a bound of its own, but each sequence of a request (`n` for each prompt) carries the same lists, samplers
# and grammar. So each row of PRICES multiplies an amount by the number of sequences, and bounds the product. The worker
# has bounds of its own (worker/engine/validation.py) against a frontend that sends anything.

PACKED = 16  # a packed id of a DRY breaker costs a sixteenth of an id in a list
LISTS: tuple[tuple[str, Callable[[Sampling], int]], ...] = (  # field, how many ids its list has
    ("logit_bias", lambda sampling: len(sampling.logit_bias)),
    ("allowed_token_ids", lambda sampling: len(sampling.allowed_token_ids)),
    ("bad_words", lambda sampling: sum(map(len, sampling.bad_words))),
    ("stop_token_ids", lambda sampling: len(sampling.stop_token_ids)),
    ("dry_sequence_breakers", lambda sampling: breaker_ids(sampling) // PACKED),
)


@dataclass(frozen=True, slots=True)
class Price:
    """One kind of cost. amount: of one sequence; most: of all sequences of a request together."""

    unit: str
    most: int
    amount: Callable[[Sampling], int]
    field: Callable[[Sampling], str]


def breaker_ids(sampling: Sampling) -> int:
    """Returns how many ids the breakers of DRY have."""
    dry = None if sampling.chain is None else sampling.chain.dry
    return 0 if dry is None else (len(dry.breakers) + sum([len(one.heads) for one in dry.long_breakers])) // 4


def _longest_list(sampling: Sampling) -> str:
    return max(LISTS, key=lambda row: row[1](sampling))[0]


PRICES = (
    # A worker decodes an id in 30 to 150 ns and keeps up to 120 bytes for it until the request runs.
    Price(
        "token ids in lists", 1 << 19, lambda sampling: ids_in_lists(sampling) + breaker_ids(sampling) // PACKED,
        _longest_list,
    ),
    # A sampler takes up to 20 ms for a row of 152,000 tokens.
    Price(
        "samplers", 1024, lambda sampling: 0 if sampling.chain is None else len(sampling.chain.order),
        lambda _: "samplers",
    ),
    Price("characters of grammar", 16 << 20, lambda sampling: len(sampling.grammar), lambda _: "tools"),
)  # fmt: skip


def check_price(request: GenerationRequest) -> None:
    """Raises Unprocessable, which names the field, if a request costs more than it may."""
    sampling = request.sampling
    if not (
        sampling.chain is not None or sampling.logit_bias or sampling.has_token_rules or sampling.stop_token_ids
        or sampling.grammar
    ):  # fmt: skip
        return
    count = len(request.prompts) * request.n
    for price in PRICES:
        each = price.amount(sampling)
        if each * count > price.most:
            param = price.field(sampling)
            raise Unprocessable(
                f"`{param}`: {each} {price.unit} in each of {count} answers are more than the {price.most} that a "
                "request may have in all",
                param=param, code="out_of_range",
            )  # fmt: skip


DRAINING_RETRY_S = 5.0  # the Retry-After while draining: another server may have taken over by then
HANDSHAKE_S = 0.5  # how long a request waits for a worker that may be ready at any moment
MAX_TOKENS = 1 << 22  # limit on prompt tokens times `n` in a request of several sequences: 16 MiB of messages
FULL_S = 0.25  # pause before prompts are submitted again that the workers' queue had no place for
WITHOUT_WORKER = ("not_ready", "worker_lost")  # codes of refusals while no worker is ready
POLL_S = 0.02  # pause between two checks for the end of a handshake or of a drain


@dataclass(frozen=True, slots=True)
class Earlier:
    """What another process had of a choice: the drawn seed, and the tokens that need not be generated again."""

    seed: int | None = None
    tokens: Sequence[int] = ()

    def after(self, brought: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of the request's own earlier output, and then these."""
        return [*brought, *self.tokens] if self.tokens else brought


NOTHING_EARLIER = Earlier()


class Service:
    """Starts requests, and keeps the set of running requests."""

    def __init__(
        self,
        pool: WorkerPool,
        tokenizer: asyncio.Future[Tokenizer],
        metrics: RequestMetrics | None = None,
        prefix_cache_scope: str = "all",
    ) -> None:
        """prefix_cache_scope: which requests share cached prefixes, see --prefix-cache-scope"""
        self.pool = pool
        self.metrics = metrics or RequestMetrics()
        self.generations: set[Generation] = set()  # all generations that are not closed
        self.draining = False
        self.prompt_places = PromptPlaces(pool.places)  # for the prompts of `Windows`
        self._tokenizer = tokenizer
        self._groups = itertools.count(1)
        self._prefix_cache_scope = prefix_cache_scope

    @property
    def readiness(self) -> Readiness:
        """Whether requests can be served now and, if not, why."""
        if self.draining:
            return DRAINING
        if not self._tokenizer.done():
            return not_ready("loading the tokenizer")
        if self._tokenizer.cancelled() or self._tokenizer.exception() is not None:
            return NO_TOKENIZER
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
        """Waits for the tokenizer and for the handshake with the workers, for at most HANDSHAKE_S.
        This matters if another frontend on the same port has already told the client that the server is ready.

        Raises:
            Overloaded: requests still cannot be served after that time.
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

    async def start(
        self, request: GenerationRequest, arrived_at: float | None = None, earlier: Sequence[Earlier] = ()
    ) -> "Generation":
        """Submits the sequences of a request, and returns when all of them are admitted.

        arrived_at: when the request's body had been read, by `time.perf_counter()`; None means now
        earlier: for each choice, what another process had of it; its tokens are to be taken by `Generation.replay`

        Raises:
            Unprocessable: the workers could not hold all the sequences even without other requests.
            Overloaded, Unprocessable: a sequence was refused; the others are aborted.
            DeadlineExceeded: `deadline_ms`, counted from `arrived_at`, passed before all sequences were admitted.
        """
        self._check_ready()
        self._check_size(request)
        check_price(request)
        arrived_at = time.perf_counter() if arrived_at is None else arrived_at
        outputs = self._outputs(request)
        try:
            streams = await self._submit_in_time(request, arrived_at, earlier)
        except Unprocessable as refused:  # the worker does not know how the API format calls the prompt
            raise refused.renamed("prompt", request.param) from None
        for stream in streams if earlier else ():
            stream.rewind(request.brought)
        checked = request.features.checked
        self.metrics.admitted(request.prompt_tokens + len(checked or ()))
        choices = [
            Choice(index, request, stream, text, extras)
            for index, (stream, (text, extras)) in enumerate(zip(streams, outputs, strict=True))
        ]
        generation = Generation(
            choices, self.pool, self.metrics, self.generations,
            arrived_at=arrived_at, generates=checked is None,
        )  # fmt: skip
        if request.admission.deadline_ms:
            generation.fail_after(_time_left(request, arrived_at))
        return generation

    def _outputs(self, request: GenerationRequest) -> list[tuple[OutputText, list[Extra]]]:
        """Returns the detokenizer and the extras of each choice. Submits nothing yet."""
        tokenizer, shown = self.tokenizer, self._shown_specials(request)
        stops, searched = Stops(request.stops) if request.stops else None, searched_text(request.parser_config)
        outputs = []
        for index in range(len(request.prompts) * request.n):
            text = OutputText(tokenizer.detokenizer(shown), stops, searched, include_stop=request.shown.stop)
            extras = extras_of(request, index, text, lambda: OutputText(tokenizer.detokenizer()))
            outputs.append((text, extras))
        return outputs

    def _check_size(self, request: GenerationRequest) -> None:
        """Raises Unprocessable for more sequences than the workers can hold, before any message is made."""
        count = len(request.prompts) * request.n
        if count == 1:
            return
        param = "n" if request.n > 1 else "prompt"
        places, tokens = self.pool.places(request.admission.fingerprint), request.n * request.prompt_tokens
        if 0 < places < count:
            problem = f"asks for {count} answers at once, but the server has room for {places}"
        elif tokens > MAX_TOKENS:
            problem = f"asks for {count} answers to {tokens} tokens of prompts, but a request may have {MAX_TOKENS}"
        else:
            return
        raise Unprocessable(f"`{param}` {problem}", param=param, code="out_of_range")

    def _salt(self, request: GenerationRequest) -> str:
        """Returns the cache salt: only requests with the same salt share cached prefixes."""
        tenant = request.admission.tenant if self._prefix_cache_scope == "tenant" else ""
        return PrefixIdentity(request.admission.cache_salt, tenant, request.features.adapter).text

    def _shown_specials(self, request: GenerationRequest) -> dict[str, str]:
        """Returns the special tokens that appear in the output's text, each with the text that stands for it."""
        marks = dict(request.parser_config.marks) if request.parser_config else {}
        if not request.shown.specials:
            return marks
        sampling, hidden = request.sampling, set[int]()
        if not request.shown.stop:
            hidden = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.tokenizer.eos_ids)}
        return self.tokenizer.specials_except(hidden) | marks

    async def _submit_in_time(
        self, request: GenerationRequest, arrived_at: float, earlier: Sequence[Earlier]
    ) -> list[Stream]:
        if not request.admission.deadline_ms:
            return await self._submit(request, earlier)
        left = _time_left(request, arrived_at)
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self._submit(request.admitted(deadline_ms=math.ceil(1e3 * left)), earlier)
        for _ in range(len(request.prompts) * request.n):
            self.metrics.aborted("deadline_exceeded")
        raise deadline_error()

    async def _submit(self, request: GenerationRequest, earlier: Sequence[Earlier]) -> list[Stream]:
        admission, features = request.admission, request.features
        single = len(request.prompts) == request.n == 1
        fingerprint = admission.fingerprint or ("" if single else self.pool.fingerprint)
        salt = self._salt(request)
        earlier = earlier or [NOTHING_EARLIER] * (len(request.prompts) * request.n)
        calls = [
            self.pool.submit(
                prompt, _sampling(request.sampling, n, had.seed), cache_salt=salt, group=group,
                adapter=features.adapter, deadline_ms=admission.deadline_ms, priority=admission.priority,
                tenant=admission.tenant, fingerprint=fingerprint, generated=had.after(features.continued),
                answer=features.checked, scored_from=features.scored.starts[i] if features.scored else 0,
                pooling=features.pooling, images=features.images, predicted=features.predicted,
                second_from=features.seconds[i] if features.seconds else 0, keep_s=admission.keep_s,
            )
            for i, (prompt, group) in enumerate(zip(request.prompts, self._group_ids(request), strict=True))
            for n, had in enumerate(earlier[i * request.n : (i + 1) * request.n])
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
        if request.features.one_group:
            return [next(self._groups)] * len(request.prompts)
        return [next(self._groups) if request.n > 1 else 0 for _ in request.prompts]

    async def drain(self, timeout: float) -> None:
        """Admits no more requests, lets running ones finish for `timeout` seconds, then ends the rest with an error.

        Requests that wait for the return of a lost worker end immediately.
        """
        self.draining = True
        deadline = time.monotonic() + timeout
        while self.generations and time.monotonic() < deadline:
            self.pool.end_waiting()
            await asyncio.sleep(POLL_S)
        for generation in list(self.generations):
            generation.fail(Overloaded("the server is shutting down", code="shutdown", retry_after=1.0))


def _time_left(request: GenerationRequest, arrived_at: float) -> float:
    """Returns the seconds until the request's deadline."""
    return arrived_at + request.admission.deadline_ms / 1e3 - time.perf_counter()


def _sampling(sampling: Sampling, n: int, seed: int | None) -> Sampling:
    """Returns the sampling of choice `n` of a prompt. seed: the one drawn before; None: the request's plus `n`"""
    if seed is not None:
        return msgspec.structs.replace(sampling, seed=seed)
    if sampling.seed is None or n == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + n) % (1 << 64))


# A request with many prompts, which are submitted a few at a time so that they fit in a worker's queue.
#
# A request that generates text is admitted as a whole, before its response begins. A request for vectors or
# log-probabilities is answered only when all its prompts are computed. If the workers' queue is full when it begins, it
# is refused, unless prompts of the same tenant are computed (other frontends may have filled it, and prompt_places.py
# does not see theirs). Later it waits, because what is computed would be lost.

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
        longest = max(map(len, prompts), default=1)
        size = min(WINDOW, self._service.pool.places() or WINDOW, max(1, MAX_TOKENS // longest))
        for first in range(0, len(prompts), size):
            at = slice(first, first + size)
            window = _window(self._request, at).admitted(fingerprint=self.fingerprint)
            async with AsyncExitStack() as held:
                await self._enter_in_time(held, window, left=self._request.prompts[first:])
                generation = await self._start(window)
                self.fingerprint = generation.fingerprint
                self.choices += generation.choices
                held.enter_context(self._service.prompt_places.computing(window.admission.tenant))
                try:
                    async for deltas in generation.deltas():
                        for delta in deltas:
                            delta.index += first
                        yield deltas
                finally:
                    generation.close()
                    self.reason = generation.reason

    async def _enter_in_time(
        self, held: AsyncExitStack, window: GenerationRequest, left: Sequence[Sequence[int]]
    ) -> None:
        """Waits for places, which `held` frees. left: the request's prompts that are not computed yet"""
        admission = window.admission
        tokens, begun = sum(map(len, left)), len(left) < len(self._request.prompts)
        ask = Ask(admission.tenant, len(window.prompts), tokens, admission.priority, begun)
        seconds = max(0.0, _time_left(window, self._arrived_at)) if admission.deadline_ms else None
        try:
            async with asyncio.timeout(seconds):
                await held.enter_async_context(self._service.prompt_places.taken(ask))
        except TimeoutError:
            for _ in window.prompts:
                self._service.metrics.aborted("deadline_exceeded")
            raise deadline_error() from None

    async def _start(self, window: GenerationRequest) -> Generation:
        """Submits prompts, again and again while the queue is full of the tenant's own, or while a request whose first
        prompts are computed has no worker: then it waits for one as long as streams do. Raises what `start` raises.
        """
        places, tenant, begun = self._service.prompt_places, window.admission.tenant, bool(self.choices)
        lost_at: float | None = None
        while True:
            try:
                return await self._service.start(window, self._arrived_at)
            except Overloaded as refused:
                if refused.code == "queue_full":
                    if not (begun or places.is_computing(tenant)):
                        raise
                elif not begun or refused.code not in WITHOUT_WORKER or self._service.draining:
                    raise
                elif lost_at is None:
                    lost_at = time.monotonic()
                elif time.monotonic() - lost_at > self._service.pool.recovery_timeout:
                    raise
                if window.admission.deadline_ms and _time_left(window, self._arrived_at) <= 0:
                    raise deadline_error() from None
                await asyncio.sleep(min(refused.retry_after or FULL_S, FULL_S))


def _window(request: GenerationRequest, at: slice) -> GenerationRequest:
    """Returns the request with only the prompts `at`."""
    features = request.features
    if features.seconds:
        features = replace(features, seconds=features.seconds[at])
    if features.scored is not None:
        features = replace(features, scored=replace(features.scored, starts=features.scored.starts[at]))
    return replace(request, prompts=request.prompts[at], features=features)
