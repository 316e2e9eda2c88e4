"""An LLM over a fake worker pool."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from deploy.offline.batch import BatchRunner
from deploy.offline.inputs import Contexts
from deploy.offline.llm import LLM
from frontend.errors import Overloaded
from frontend.generation.service import Service
from frontend.output_parser.model_format import ModelFormat
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from shared.wire import unpack_u32
from tests.fakes import FakePool, Play, context
from tests.patience import PATIENCE_S


def prompt_of(stream: Stream) -> list[int]:
    return [int(token) for token in unpack_u32(stream.submit.prompt)]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_now([text], False)[0]


def echoing(seconds: Callable[[list[int]], float] = lambda prompt: 0.001) -> Play:
    """Makes the fake worker repeat the prompt (without its `<s>`), one token every `seconds(prompt)`."""

    def play(pool: FakePool, stream: Stream) -> None:
        said = [token for token in prompt_of(stream) if token < 264]
        pause = seconds(said)

        def step() -> None:
            done = len(stream.output)
            pool.send_tokens(stream, said[done : done + 1])
            if done + 1 < len(said):
                pool.later(step, pause)
            else:
                pool.end(stream)

        pool.later(step, pause)

    return play


@dataclass(eq=False)
class LimitedPool(FakePool):
    """A pool that runs only a few requests at a time. most: the largest number of requests that ran at once"""

    room: int = 1000
    most: int = 0

    async def submit(self, prompt: list[int], sampling: m.Sampling, **more: Any) -> Stream:
        if self.live >= self.room:
            self.calls += 1
            raise Overloaded("full", code="queue_full", retry_after=60.0)
        stream = await super().submit(prompt, sampling, **more)
        self.most = max(self.most, self.live)
        return stream


@contextmanager
def llm_over(
    pool: FakePool,
    tokenizer: Tokenizer,
    style: ModelFormat | None = None,
    max_seq_len: int = 160,
    adapters: Mapping[str, m.Adapter] = {},
    **more: Any,
) -> Iterator[LLM]:
    known = context(tokenizer, max_seq_len=max_seq_len, vocab_size=tokenizer.vocab_size, style=style or ModelFormat())

    @asynccontextmanager
    async def open_runner() -> AsyncIterator[BatchRunner]:
        loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        loaded.set_result(tokenizer)
        try:
            yield BatchRunner(Service(pool, loaded), Contexts(known, adapters), **more)
        finally:
            await pool.close()

    with LLM.over(open_runner) as llm:
        yield llm
    assert pool.closed


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
