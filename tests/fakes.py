"""A worker pool without sockets, which a test drives by hand.

Its streams are real. `play` is called with each admitted stream. Without `play`, the test feeds the streams itself,
with `send_tokens`, `send_logprobs` and `end`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from frontend.errors import SluiceError
from frontend.model_context import ModelContext
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from frontend.workers import status as workers
from frontend.workers.connection import ConnectionCounters
from frontend.workers.status import ConnectionState, Readiness, WorkerStatus
from frontend.workers.stream import Stream
from shared import messages as m
from shared.wire import pack_f32, pack_u32, unpack_u32
from tests.frontend.text.tokenizers import byte_level, save

MODEL = "tiny"
LIMITS = m.Limits(max_seq_len=512, vocab_size=269, eos_token_ids=(265,))
READY_STATUS = m.Status(
    epoch=1, pid=4711, model=MODEL, device="cpu", dtype="float32", state=m.WorkerState.READY, max_seq_len=512,
    pages=m.Pages(free=6, cached=3, owned=1, total=10), running=2, waiting=1, prefix_queries=100, prefix_hits=40,
    frontends=(m.ConnectedFrontend("ab", 12, 3),), draft_tokens=9, accepted_tokens=5, drafted_at=(6, 3),
    accepted_at=(4, 1),
    kv_cache=(m.KVUsage("full", 1, 10, 4096), m.KVUsage("window", 2, 5, 1024), m.KVUsage("state", 3, 7, 2048)),
)  # fmt: skip

STATES = {workers.READY: ConnectionState.READY, workers.DRAINING: ConnectionState.DRAINING}

Play = Callable[["FakePool", Stream], None]


@dataclass(slots=True)
class Submitted:
    prompt: list[int]
    sampling: m.Sampling
    stream: Stream
    group: int = 0


@dataclass(eq=False)
class FakePool:
    """A fake `WorkerPool`.

    refusals: index of a call of submit → the error that it raises. delays: index → seconds until the admission
    """

    play: Play | None = None
    refusals: dict[int, SluiceError] = field(default_factory=dict)
    delays: dict[int, float] = field(default_factory=dict)
    status: m.Status | None = READY_STATUS
    welcome: m.Welcome | None = field(
        default_factory=lambda: m.Welcome(1, 1, 4711, MODEL, "", LIMITS, fingerprint="fp_worker")
    )
    readiness: Readiness = workers.READY
    handshaking: bool = False
    counters: ConnectionCounters = field(default_factory=ConnectionCounters)
    submitted: list[Submitted] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    started: bool = False
    closed: bool = False
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    calls: int = 0
    recovery_timeout: float = 120.0
    resets: int = 0  # how often the prefix cache was reset
    deaf: bool = False  # whether the worker leaves resets unconfirmed

    async def start(self) -> None:
        self.started = True

    def end_waiting(self) -> None:
        """No stream of the fake ever waits for a worker."""

    async def close(self, reason: str = "") -> None:
        self.closed = True
        for task in self.tasks:
            task.cancel()

    @property
    def membership(self) -> Self:
        """Returns the fake itself, which has the methods of a membership, too."""
        return self

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the only worker."""
        return self.welcome.fingerprint if self.welcome else ""

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprint of the only worker, if it is ready."""
        return [worker.fingerprint for worker in self.statuses() if worker.ready]

    def places(self, fingerprint: str = "") -> int:
        """The number of sequences that the only worker can hold."""
        return self.welcome.limits.max_sequences if self.welcome else 0

    def concurrency(self) -> int:
        """The number of sequences that the only worker can run at once."""
        return self.welcome.limits.max_batch if self.welcome else 0

    @property
    def connections(self) -> list[Self]:
        """Returns the fake itself as the connection to its only worker."""
        return [self]

    def reset_prefix_cache(self, nonce: int) -> None:
        self.resets += 1
        if self.status is not None and not self.deaf:
            self.status = msgspec.structs.replace(self.status, prefix_cache_reset=nonce)

    def statuses(self) -> list[WorkerStatus]:
        """Returns the status of the only worker; nothing before its first status."""
        state = STATES.get(self.readiness, ConnectionState.LOADING)
        return (
            [WorkerStatus("fake", state, self.readiness.text, self.status, fingerprint=self.fingerprint)]
            if self.status
            else []
        )

    @property
    def live(self) -> int:
        return sum(submitted.stream.end is None for submitted in self.submitted)

    async def submit(
        self,
        prompt: list[int],
        sampling: m.Sampling,
        *,
        cache_salt: str = "",
        group: int = 0,
        deadline_ms: int = 0,
        priority: int = 0,
        tenant: str = "",
        pooling: m.Pooling | None = None,
        adapter: m.Adapter | None = None,
        fingerprint: str = "",
        generated: Iterable[int] = (),
        scored_from: int = 0,
        answer: list[int] | None = None,
        images: Sequence[m.PromptImage] = (),
        predicted: Sequence[int] | None = None,
        second_from: int = 0,
        keep_s: int = 0,
    ) -> Stream:
        self.calls += 1
        call = self.calls - 1
        if call in self.delays:
            await asyncio.sleep(self.delays[call])
        if call in self.refusals:
            raise self.refusals[call]
        message = m.Submit(
            call + 1, pack_u32(prompt), sampling, pack_u32(generated), cache_salt, group, deadline_ms, priority, 0,
            tenant, pooling=pooling, scored_from=scored_from,
            answer=None if answer is None else pack_u32(answer), adapter=adapter, images=list(images) or None,
            prediction=None if predicted is None else pack_u32(predicted), second_from=second_from,
            keep_s=keep_s,
        )  # fmt: skip
        admission = asyncio.get_running_loop().create_future()
        stream = Stream(message, admission, seed=sampling.seed or 77, fingerprint=fingerprint or self.fingerprint)
        self.submitted.append(Submitted(prompt, sampling, stream, group))
        if self.play is not None:
            self.play(self, stream)
        return stream

    def abort(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            if stream.end is None:
                self.aborted.append(stream.id)
                self.end(stream, m.Outcome.ABORTED)

    # Messages that the worker sends

    def send_tokens(self, stream: Stream, ids: Iterable[int]) -> None:
        if stream.end is None:
            stream.add_tokens(len(stream.output), list(ids))

    def send_logprobs(
        self, stream: Stream, start: int, logprobs: list[float], *, prompt: bool = False, k: int = 0
    ) -> None:
        """Sends the ids 1 to k as the most likely tokens of each position, with equal log-probabilities."""
        ids = list(range(1, k + 1)) * len(logprobs)
        values = [logprob for logprob in logprobs for _ in range(k)]
        columns = pack_f32(logprobs), k, pack_u32(ids), pack_f32(values)
        stream.add_logprobs(m.Logprobs(stream.id, start, *columns, prompt))

    def end(self, stream: Stream, outcome: m.Outcome = m.Outcome.EOS, error: str = "", cached: int = 0) -> None:
        timings = m.Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, cached_tokens=cached)
        stream.finish(m.End(stream.id, outcome, len(stream.output), error, timings))

    def later(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Calls `work` after `seconds`."""

        async def call() -> None:
            await asyncio.sleep(seconds)
            work()

        task = asyncio.ensure_future(call())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def pooling(values: Callable[[list[int]], list[float]], outcome: m.Outcome = m.Outcome.POOLED) -> Play:
    """Returns a `play` that answers each prompt with a vector of the prompt's ids."""

    def play(pool: FakePool, stream: Any) -> None:
        def end() -> None:
            stream.vector = pack_f32(values(unpack_u32(stream.submit.prompt).tolist()))
            pool.end(stream, outcome, cached=2)

        pool.later(end)

    return play


def sending(*pieces: list[int], outcome: m.Outcome = m.Outcome.EOS, error: str = "", pause_s: float = 0.0) -> Play:
    """Returns a `play` that sends the pieces one after another, and the end together with the last piece."""

    def play(pool: FakePool, stream: Stream) -> None:
        def step(i: int) -> None:
            if i < len(pieces):
                pool.send_tokens(stream, pieces[i])
            if i >= len(pieces) - 1:
                pool.end(stream, outcome, error)
            else:
                pool.later(lambda: step(i + 1), pause_s)

        pool.later(lambda: step(0), pause_s)

    return play


def context(tokenizer: Tokenizer, **more: Any) -> ModelContext:
    template = ChatTemplate(
        tokenizer.templates, tokenizer.named_tokens, supports_vision=tokenizer.image_format is not None
    )
    return replace(ModelContext(MODEL, 64, LIMITS.vocab_size, tokenizer, template), **more)


def tokenizer(folder: Path) -> Tokenizer:
    """Loads a byte-level tokenizer: ids 0 to 255 are bytes, `<s>` 264 begins a prompt, `</s>` 265 ends an answer."""
    return Tokenizer.load(save(byte_level(), folder, tokenizer_config={"chat_template": TEMPLATE}))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
