"""A compute loop with request table and scheduler, without sockets or a device. Tests run its iterations."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.patience import PATIENCE_S
from tests.wire.harness import VOCAB, Done, expected, next_id
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable
from worker.engine.transport import FrontendGone
from worker.engine.validation import no_images
from worker.kv_cache.pages import PagePool
from worker.model_runner.step import StepOutput
from worker.scheduler import sequence as scheduled
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Chunk, Plan

if TYPE_CHECKING:
    from worker.structured_output.compiler import GrammarCompiler

ME, YOU = b"frontend", b"otherone"
CONFIG = SchedulerConfig(max_seq_len=512, max_waiting_requests=8)


@dataclass
class FakeServer:
    inbox: deque[tuple[bytes, m.Request | FrontendGone]] = field(default_factory=deque)
    sent: list[tuple[bytes, m.Step]] = field(default_factory=list)

    def publish(self, topic: bytes, step: m.Step) -> None:
        self.sent.append((topic, step))

    def progress(self) -> None: ...
    def flush(self) -> None: ...
    def refresh(self) -> None: ...


@dataclass
class FakeRunner:
    """A runner without a model. check: called with the chunks of a step, and may raise, as a device does"""

    cuts_prompts = True  # not a field

    check: Callable[[list[Chunk]], None] = lambda chunks: None
    steps: list[int] = field(default_factory=list)  # tokens of each successful step

    def check_device(self) -> None: ...

    def launch(self, plan: Plan, before: Done | None) -> Done:
        self.check(plan.chunks)
        self.steps.append(plan.tokens)
        return Done(plan, StepOutput([next_id(chunk.sequence.tokens) for chunk in plan.sampling]))


class Bench:
    """A compute loop with request table and scheduler. `now` advances by a second in each iteration."""

    def __init__(
        self,
        check: Callable[[list[Chunk]], None] = lambda chunks: None,
        *,
        runner: Any = None,
        config: SchedulerConfig = CONFIG,
        pools: Sequence[PagePool] | None = None,
        vocab_size: int = VOCAB,
        canary_s: float = 0.0,
        slots: PagePool | None = None,
        compiler: "GrammarCompiler | None" = None,
        give_images: Callable[[scheduled.Sequence, m.Submit], None] = no_images,
        clock: Callable[[], float] = lambda: 0.0,  # stands still, so that an iteration receives all messages
    ) -> None:
        """runner: replaces the FakeRunner. check: called by the FakeRunner"""
        self.now = 0.0
        self.runner: Any = runner or FakeRunner(check)
        self.scheduler = Scheduler(config, pools or [PagePool(129, 16)], slots)
        self.stats, self.metrics, self.server = Stats(), Metrics(), FakeServer()
        self.request_table = RequestTable(
            self.scheduler,
            self.stats,
            self.metrics,
            vocab_size=vocab_size,
            seeds=random.Random(0),
            compiler=compiler,
            give_images=give_images,
            clock=clock,
        )
        self.loop = Loop(
            self.scheduler, self.runner, self.request_table, self.server, self.stats, self.metrics, lambda: self.now,  # type: ignore[arg-type]
            canary_s=canary_s,
        )  # fmt: skip

    def send(self, *messages: m.Request | FrontendGone, who: bytes = ME) -> None:
        self.server.inbox.extend((who, message) for message in messages)

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            self.loop.iterate()
        self.scheduler.check()

    def iterate_until(self, ended: Callable[[], bool]) -> None:
        """Iterates until it has ended, however many iterations others (compilations) take for their part."""
        deadline = time.monotonic() + PATIENCE_S
        while not ended():
            assert time.monotonic() < deadline, "it does not come to an end"
            self.iterate()
            if not self.scheduler.has_work:
                time.sleep(0.001)  # the thread that it waits for needs the processor

    def drain(self) -> None:
        """Iterates until all requests have ended, also those whose grammar or adapter is still being prepared."""
        self.iterate_until(lambda: not (self.server.inbox or self.request_table._preparing or self.busy))

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or bool(self.loop.in_flight)

    def received(self, who: bytes = ME) -> tuple[dict[int, list[int]], dict[int, m.End]]:
        """Returns output ids and ends by request id. Asserts that each offset continues the output."""
        outputs: dict[int, list[int]] = {}
        ends: dict[int, m.End] = {}
        for topic, step in self.server.sent:
            if topic != who:
                continue
            tokens = iter(unpack_u32(step.tokens))
            for id, start, count in zip(
                unpack_u32(step.ids), unpack_u32(step.starts), unpack_u32(step.counts), strict=True
            ):
                output = outputs.setdefault(id, [])
                assert start == len(output)
                output += [next(tokens) for _ in range(count)]
            for end in step.ends:
                assert end.id not in ends, "an end was sent twice"
                ends[end.id] = end
        return outputs, ends


def submit(id: int, prompt: list[int], max_tokens: int = 5, **options: object) -> m.Submit:
    return m.Submit(id, pack_u32(prompt), m.Sampling(max_tokens), **options)  # type: ignore[arg-type]


def check_only_one_failed(bench: Bench, culprit: int) -> None:
    """Checks that of the requests 0 to 5, whose prompts are 20 times their number + 1, only `culprit` has failed.

    The culprit has sent its first two tokens, the others are complete, and no page is in use any more.
    """
    outputs, ends = bench.received()
    for i in range(6):
        wanted = expected([i + 1] * 20, 5)
        assert outputs[i] == (wanted[:2] if i == culprit else wanted)
        assert ends[i].outcome is (m.Outcome.ERROR if i == culprit else m.Outcome.LENGTH)
    assert "unlucky" in ends[culprit].error
    assert bench.scheduler.state.paging.pools[0].counts().owned == 0
