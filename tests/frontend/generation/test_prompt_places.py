"""Prompts for vectors wait for their turn instead of being refused: `PromptPlaces`, and `Windows` where it is used."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from frontend.errors import DeadlineExceeded, Overloaded
from frontend.generation.prompt_places import FEW, MOST_WAITING, Ask, PromptPlaces
from frontend.generation.service import WINDOW, Windows
from frontend.request import Admission, Features, GenerationRequest
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared.messages import Outcome, Pooling, PoolingKind, Sampling
from tests.fakes import FakePool, pooling
from tests.frontend.generation.harness import make_service

PLACES = 800  # so that one tenant may have 400, and all 600


class Queue:
    """Requests that hold places until they are told to leave."""

    def __init__(self, places: int = PLACES) -> None:
        self.places = PromptPlaces(lambda: places)
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def enter(self, name: str, prompts: int, tenant: str = "a", tokens: int = 1, **more: Any) -> None:
        end = self._ends[name] = asyncio.Event()

        async def hold() -> None:
            async with self.places.taken(Ask(tenant, prompts, tokens, **more)):
                self.inside.append(name)
                await end.wait()
            self.inside.remove(name)

        self._tasks[name] = asyncio.create_task(hold())
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await asyncio.sleep(0)


async def test_prompts_wait_in_order_of_priority_and_then_of_time() -> None:
    queue = Queue()
    await queue.enter("first", 300)
    await queue.enter("fits", 100)
    for name, prompts, priority in (("late", 200, 0), ("later", 200, 0), ("urgent", 200, -1)):
        await queue.enter(name, prompts, priority=priority)
    assert queue.inside == ["first", "fits"]
    await queue.leave("first")
    assert queue.inside == ["fits", "urgent"]
    await queue.leave("fits")
    assert queue.inside == ["urgent", "late"]
    await queue.leave("urgent")
    assert queue.inside == ["late", "later"]


async def test_another_tenant_need_not_wait_and_more_than_fit_go_alone() -> None:
    queue = Queue()
    await queue.enter("large", PLACES)
    await queue.enter("small", 10)
    await queue.enter("other", PLACES, tenant="b")
    assert queue.inside == ["large", "other"]
    await queue.leave("large")
    assert queue.inside == ["other", "small"]
    unknown = Queue(places=0)
    for name in "abc":
        await unknown.enter(name, 1000)
    assert unknown.inside == ["a", "b", "c"]


async def test_few_prompts_need_not_wait_for_many() -> None:
    queue = Queue()
    await queue.enter("index", 400)
    await queue.enter("more", 400)
    await queue.enter("question", FEW)
    assert queue.inside == ["index", "question"]
    for index in range((600 - 400) // FEW):
        await queue.enter(f"another {index}", FEW)
    assert "more" not in queue.inside and len(queue.inside) == 1 + (600 - 400) // FEW, "until three quarters are taken"


async def test_prompts_that_leave_early_hold_up_nobody() -> None:
    queue = Queue()
    await queue.enter("first", 400)
    await queue.enter("wide", 400)
    await queue.enter("small", 100)
    await queue.cancel("wide")
    assert queue.inside == ["first"]
    await queue.enter("last", 350)
    await queue.enter("next", 10)
    queue._ends["first"].set()
    queue._tasks["small"].cancel()  # before its turn comes, but it learns of it after that
    await queue.leave("first")
    assert queue.inside == ["last", "next"] and not queue.places._waiting_tokens
    await queue.enter("more", 400)
    queue._ends["last"].set()
    queue._ends["next"].set()
    await asyncio.sleep(0)
    await queue.cancel("more")  # when it has got its places, but has not run since
    assert "more" not in queue.inside
    await queue.enter("after", 400)
    assert queue.inside == ["after"]


async def test_more_tokens_than_may_wait_are_refused_unless_their_request_has_begun() -> None:
    queue = Queue()
    await queue.enter("first", 400)
    await queue.enter("second", 10, tokens=MOST_WAITING)  # one may always wait
    with pytest.raises(Overloaded, match="waiting") as refused:
        async with queue.places.taken(Ask("a", 10, 1)):
            pass
    assert refused.value.code == "queue_full"
    await queue.enter("begun", 10, begun=True)
    await queue.enter("other", 400, tenant="b")
    await queue.enter("another", 400, tenant="b")
    assert queue.inside == ["first", "other"] and queue.places._waiting_tokens.total() == MOST_WAITING + 2
    await queue.leave("first")
    assert queue.inside == ["other", "second", "begun"]


def _asked(prompts: int, deadline_ms: int = 0) -> GenerationRequest:
    return GenerationRequest(
        tuple([[1]] * prompts), Sampling(0), admission=Admission("", deadline_ms, 0),
        features=Features(pooling=Pooling(PoolingKind.MEAN)),
    )  # fmt: skip


async def _vectors(windows: Windows) -> int:
    return sum([len(deltas) async for deltas in windows.deltas()])


async def test_many_requests_never_have_more_with_the_workers_than_their_share(tokenizer: Tokenizer) -> None:
    most = 0

    def counting(pool: FakePool, stream: Stream) -> None:
        nonlocal most
        most = max(most, pool.live)
        answer(pool, stream)

    answer = pooling(lambda ids: [1.0])
    pool = FakePool(play=counting)
    service = make_service(tokenizer, pool)
    service.prompt_places = PromptPlaces(lambda: PLACES)
    asked = [Windows(service, _asked(2 * WINDOW), 0.0) for _ in range(6)]
    counted = await asyncio.gather(*map(_vectors, asked))
    assert counted == [2 * WINDOW] * 6
    assert WINDOW <= most <= PLACES // 2


async def test_full_queue_halfway_is_waited_for(tokenizer: Tokenizer) -> None:
    full = Overloaded("full", code="queue_full", retry_after=0.01)
    pool = FakePool(play=pooling(lambda ids: [1.0]), refusals={WINDOW: full, WINDOW + 7: full})
    service = make_service(tokenizer, pool)
    assert await _vectors(Windows(service, _asked(WINDOW + 5), 0.0)) == WINDOW + 5
    assert pool.calls > WINDOW + 5 and not pool.live


@pytest.mark.parametrize("code", ["not_ready", "worker_lost"])
async def test_worker_that_is_lost_halfway_is_waited_for(tokenizer: Tokenizer, code: str) -> None:
    lost = Overloaded("the worker was lost", code=code, retry_after=0.01)
    pool = FakePool(play=pooling(lambda ids: [1.0]), refusals={WINDOW: lost, WINDOW + 1: lost})
    service = make_service(tokenizer, pool)
    assert await _vectors(Windows(service, _asked(WINDOW + 5), 0.0)) == WINDOW + 5
    pool.refusals = dict.fromkeys(range(pool.calls, pool.calls + 2 * WINDOW), lost)
    with pytest.raises(Overloaded, match="lost"):  # nothing is computed yet
        await _vectors(Windows(service, _asked(2), 0.0))
    pool.refusals = dict.fromkeys(range(pool.calls + WINDOW, pool.calls + 2 * WINDOW), lost)
    pool.recovery_timeout = 0.02
    with pytest.raises(Overloaded, match="lost"):
        await _vectors(Windows(service, _asked(WINDOW + 5), 0.0))
    assert not pool.live


async def test_queue_that_is_full_of_own_prompts_is_waited_for(tokenizer: Tokenizer) -> None:
    full = Overloaded("full", code="queue_full", retry_after=0.01)
    pool = FakePool(refusals={1: full, 2: full})
    service = make_service(tokenizer, pool)
    first = asyncio.create_task(_vectors(Windows(service, _asked(1), 0.0)))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(_vectors(Windows(service, _asked(1), 0.0)))
    other = replace(_asked(1), admission=Admission(tenant="another"))
    with pytest.raises(Overloaded, match="full"):
        await _vectors(Windows(service, other, 0.0))
    while len(pool.submitted) < 2:
        await asyncio.sleep(0.01)
    for one in pool.submitted:
        pool.end(one.stream, Outcome.POOLED)
    assert await asyncio.gather(first, second) == [1, 1]
    assert not service.prompt_places.is_computing("")


async def test_deadline_counts_while_waiting(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    service = make_service(tokenizer, pool)
    service.prompt_places = PromptPlaces(lambda: 1)
    async with service.prompt_places.taken(Ask("", 1, 1)):
        windows = Windows(service, _asked(2, deadline_ms=20), asyncio.get_running_loop().time())
        with pytest.raises(DeadlineExceeded):
            await _vectors(windows)
    assert pool.calls == 0
