"""A service over a fake worker pool."""

import asyncio
from collections.abc import Callable

from frontend.generation.generation import Generation, RequestMetrics
from frontend.generation.service import Service
from frontend.request import Delta, Finish, GenerationRequest
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import FakePool


class RecordingMetrics(RequestMetrics):
    """Records the calls of the metrics' methods, for assertions."""

    def __init__(self) -> None:
        self.aborts: list[str] = []
        self.finishes: list[Finish] = []
        self.tokens = 0

    def first_tokens(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.tokens += tokens

    def finished(self, finish: Finish, seconds: float) -> None:
        self.finishes.append(finish)

    def aborted(self, reason: str) -> None:
        self.aborts.append(reason)


def make_service(tokenizer: Tokenizer, pool: FakePool) -> Service:
    loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loaded.set_result(tokenizer)
    return Service(pool, loaded, RecordingMetrics())


def generation_request(**more: object) -> GenerationRequest:
    settings = {"prompts": ([1, 2, 3],), "sampling": Sampling(max_tokens=50), **more}
    return GenerationRequest(**settings)  # type: ignore[arg-type]


async def collect(generation: Generation) -> list[list[Delta]]:
    return [arrived async for arrived in generation.deltas()]


def encode(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode_now([text], False)[0]
