"""Prompts that a prefill worker computes for another one: which ones, and that no failure there ends a stream."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from frontend.errors import Overloaded, Unprocessable
from frontend.workers.pool import WorkerPool
from frontend.workers.remote_prefill import STEP_TOKENS, RecentPrompts
from frontend.workers.stream import Stream
from shared import messages as m
from shared.wire import pack_u32
from tests.frontend.workers.test_pool import at, idle, pool_of
from tests.patience import PATIENCE_S
from tests.wire.harness import FakeRunner, Worker, expected, sampling, until, whole
from worker.scheduler.sequence import Sequence

PREFILL, DECODE = m.Role.PREFILL, m.Role.DECODE
LONG = [token % 50 for token in range(300)]
TOKENS = 128  # of --remote-prefill-tokens


@contextmanager
def roles(folder: Path, **prefill: object) -> Iterator[tuple[Worker, Worker]]:
    """A worker that generates, and one for prompts."""
    with (
        Worker(folder / "d", role=DECODE, runner=FakeRunner(delay=0.002)) as generating,
        Worker(folder / "p", role=PREFILL, **prefill) as computing,  # type: ignore[arg-type]
    ):
        yield generating, computing
        generating.scheduler.check()
        computing.scheduler.check()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    with roles(tmp_path) as workers:
        yield workers


def attempts(pool: WorkerPool) -> dict[str, int]:
    """Returns how the attempts with prefill workers ended, without zeros."""
    ends = ("done", "failed", "lost", "late", "refused", "ended")
    return {how: count for how in ends if (count := getattr(pool.counters, f"prefill_{how}"))}


def computed(worker: Worker) -> int:
    return worker.scheduler.status.prefill_tokens


async def answer(pool: WorkerPool, prompt: list[int], count: int = 6, **more: object) -> Stream:
    """Asserts that an answer is that of one worker, and returns its stream."""
    stream = await pool.submit(prompt, sampling(count, seed=3), **more)  # type: ignore[arg-type]
    tokens, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
    assert (tokens, end.outcome, end.tokens, stream.seed) == (expected(prompt, count), m.Outcome.LENGTH, count, 3)
    return stream


async def test_long_new_prompt_is_computed_by_the_prefill_worker_and_continues_at_the_other(
    two: tuple[Worker, Worker],
) -> None:
    generating, computing = two
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        await answer(pool, LONG)
        assert computed(computing) == len(LONG) and attempts(pool) == {"done": 1}
        assert computing.scheduler.status.generation_tokens == 0
        assert generating.scheduler.status.generation_tokens == 6
        await answer(pool, LONG[: TOKENS - 1])  # short
        await answer(pool, LONG)  # known
        await answer(pool, [*LONG, *range(60)])  # most of it is known
        assert attempts(pool) == {"done": 1} and computed(computing) == len(LONG)
        await answer(pool, LONG[::-1], group=4)
        assert attempts(pool) == {"done": 2} and pool.counters.resumed == pool.counters.lost == pool.live == 0
        await until(lambda: idle(generating) and idle(computing))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_space": ""}, {"kv_space": "another"}, {"fingerprint": "another"}, {"usable": False},
        {"kv_store_tokens": 299},
    ],
)  # fmt: skip
async def test_prefill_worker_that_cannot_hand_over_is_not_asked(tmp_path: Path, options: dict[str, object]) -> None:
    with roles(tmp_path, **options) as (generating, computing):
        async with pool_of(generating, computing, remote_prefill_tokens=TOKENS) as pool:
            await answer(pool, LONG)
            assert computed(computing) == 0 and not attempts(pool)


async def test_prompt_is_new_again_after_a_reset(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        await answer(pool, LONG)
        for connection in pool.membership.connections:
            connection.reset_prefix_cache(7)
        await until(lambda: all(one.status and one.status.prefix_cache_reset for one in pool.membership.connections))
        await until(lambda: not pool._router.cached(pack_u32(LONG), "", [pool.membership.connections[0].address.name]))
        await answer(pool, LONG)
        assert attempts(pool) == {"done": 2}


async def test_requests_whose_prompt_is_part_of_the_result_stay_whole(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        for more in ({"prompt_logprobs": True}, {"max_tokens": 0}):
            await pool.submit(LONG, sampling(**{"max_tokens": 1, **more}))
        await pool.submit(LONG, sampling(5), answer=[1, 2, 3])
        assert not attempts(pool) and at(pool, 0) + computed(two[1]) > 0 and computed(two[1]) == 0


async def test_choices_of_a_prompt_share_the_prefill_worker(two: tuple[Worker, Worker]) -> None:
    _, computing = two
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        await asyncio.gather(*(answer(pool, LONG, group=7) for _ in range(4)))
        assert attempts(pool) == {"done": 4}
        assert computed(computing) < 2 * len(LONG), "the prefix cache has the first choice's pages"


async def test_cached_tokens_are_those_that_nobody_computed(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        stream = await answer(pool, LONG)
        assert stream.end is not None
        found = m.Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, cached_tokens=288, drafts=(4, 2))
        assert stream.prefilled is not None and stream.whole(found).cached_tokens == 0
        assert stream.whole(found).drafts == (4, 2) and stream.whole(found).prefill_ms > 2.0
        alone = await answer(pool, LONG)
        assert alone.prefilled is None and alone.whole(found) is found


@asynccontextmanager
async def held(worker: Worker) -> AsyncIterator[tuple[threading.Event, threading.Event]]:
    """Has a worker wait in its next step, at most until the block ends.

    Yields an event that says that it waits, and one that lets it go on.
    """
    began, go_on = threading.Event(), threading.Event()

    def trouble(sequence: Sequence) -> None:
        began.set()
        go_on.wait(PATIENCE_S)

    worker.runner.trouble = trouble
    try:
        yield began, go_on
    finally:
        go_on.set()


async def during_prefill(
    pool: WorkerPool, began: threading.Event, prompt: list[int] | None = None, **more: object
) -> Stream:
    stream = await pool.submit(prompt or LONG, sampling(6, seed=3), **more)  # type: ignore[arg-type]
    await until(began.is_set)
    assert at(pool, 1) == 1 and stream.submit.prefill is m.Prefill.ONLY
    return stream


async def ends_whole(stream: Stream) -> None:
    tokens, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
    assert (tokens, end.outcome, stream.seed) == (expected(LONG, 6), m.Outcome.LENGTH, 3)


async def test_prefill_worker_that_dies_costs_a_computation_only(two: tuple[Worker, Worker]) -> None:
    generating, computing = two
    async with held(computing) as (began, go_on), pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        stream = await during_prefill(pool, began)
        computing.server.close()  # its sockets, as a kill closes them
        await ends_whole(stream)
        assert attempts(pool) == {"lost": 1} and computed(generating) == len(LONG)
        assert stream.submit.crashes == 1, "its prompt may have been the cause"
        await answer(pool, LONG[::-1])  # all prefill workers are gone
        assert attempts(pool) == {"lost": 1} and pool.counters.lost == 0
        go_on.set()
        computing.stopped = True
        computing.thread.join()


async def test_prefill_worker_that_hangs_is_left_after_the_timeout(two: tuple[Worker, Worker]) -> None:
    generating, computing = two
    async with (
        held(computing) as (began, go_on),
        pool_of(*two, remote_prefill_tokens=TOKENS, remote_prefill_timeout=0.3) as pool,
    ):
        stream = await during_prefill(pool, began)
        await ends_whole(stream)
        assert attempts(pool) == {"late": 1} and computed(generating) == len(LONG)
        go_on.set()
        await until(lambda: idle(computing))  # it was told to stop


async def test_step_that_fails_at_the_prefill_worker_is_repeated_by_the_other(two: tuple[Worker, Worker]) -> None:
    generating, computing = two

    def trouble(sequence: Sequence) -> None:
        raise RuntimeError("a fault")

    computing.runner.trouble = trouble
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        await answer(pool, LONG)
        assert attempts(pool) == {"failed": 1} and computed(generating) == len(LONG)


async def test_draining_prefill_worker_hands_its_streams_over(two: tuple[Worker, Worker]) -> None:
    _, computing = two
    async with held(computing) as (began, go_on), pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        stream = await during_prefill(pool, began)
        computing.stopped = True
        go_on.set()
        await asyncio.to_thread(computing.thread.join)
        computing.request_table.end_all(m.Outcome.SHUTDOWN, 0.0, "no more time")
        computing.request_table.publish(computing.server, 0.0)
        await ends_whole(stream)
        assert sum(attempts(pool).values()) == 1 and pool.counters.lost == 0
        computing.server.close()


async def test_full_prefill_worker_is_passed_over(tmp_path: Path) -> None:
    slow, prompt = FakeRunner(delay=0.2), LONG * 6  # four steps
    with roles(tmp_path, runner=slow, max_batch=1, max_waiting=1) as (generating, computing):
        async with pool_of(generating, computing, remote_prefill_tokens=TOKENS) as pool:
            streams = [await pool.submit([i, *prompt], sampling(6)) for i in range(2)]
            third = await answer(pool, [2, *prompt])
            assert attempts(pool) == {"refused": 1} and third.prefilled is None
            await asyncio.gather(*map(whole, streams))
            assert attempts(pool) == {"refused": 1, "done": 2}


async def test_what_the_generating_worker_refuses_is_refused_in_its_words(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        with pytest.raises(Unprocessable, match="1000"):
            await pool.submit([*LONG, 1000], sampling(6))
        assert attempts(pool) == {"refused": 1} and pool.live == 0


@pytest.mark.parametrize("leave", [True, False])
async def test_client_that_leaves_ends_the_prefill(two: tuple[Worker, Worker], leave: bool) -> None:
    """leave: it goes away; else its deadline passes"""
    generating, computing = two
    async with held(computing) as (began, go_on), pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        stream = await during_prefill(pool, began, LONG * 3, deadline_ms=0 if leave else 100)  # two steps
        if leave:
            pool.abort([stream])
        else:
            await asyncio.sleep(0.15)
        go_on.set()
        _, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
        assert end.outcome is (m.Outcome.ABORTED if leave else m.Outcome.DEADLINE)
        await until(lambda: idle(computing))
        assert attempts(pool) == {"ended": 1} and pool.live == 0 and not generating.scheduler.status.prefix_queries


async def test_stream_waits_for_room_at_the_worker_that_generates(tmp_path: Path) -> None:
    """The worker has admitted as many as it may, and takes what is handed over nevertheless."""
    slow = FakeRunner(delay=0.02)
    with (
        Worker(tmp_path / "d", role=DECODE, runner=slow, max_batch=1, max_waiting=1) as generating,
        Worker(tmp_path / "p", role=PREFILL) as computing,
    ):
        async with pool_of(generating, computing, remote_prefill_tokens=TOKENS) as pool:
            others = [await pool.submit([i], sampling(20)) for i in range(2)]
            with pytest.raises(Overloaded):
                await pool.submit([3], sampling(1))
            await answer(pool, LONG)
            assert attempts(pool) == {"done": 1}
            await asyncio.gather(*map(whole, others))


async def test_prefill_workers_stand_in_while_no_other_worker_is_ready(two: tuple[Worker, Worker]) -> None:
    generating, computing = two
    async with pool_of(*two, remote_prefill_tokens=TOKENS) as pool:
        assert pool.places() == 96, "places at prefill workers are not for answers"
        stream = await pool.submit([5, 6], sampling(500, seed=1))
        await until(lambda: len(stream.output) > 3)
        generating.kill()
        tokens, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
        assert (tokens, end.outcome) == (expected([5, 6], 500), m.Outcome.LENGTH)
        assert computing.scheduler.status.generation_tokens > 400 and pool.membership.readiness.ready
        await answer(pool, LONG)
        assert not attempts(pool)


def turns(length: int) -> Callable[[int], bytes]:
    return lambda seed: pack_u32([seed + token % 700 for token in range(length)])


def test_next_turn_of_a_long_conversation_is_not_new() -> None:
    recent, prompt = RecentPrompts(), turns(40_000)(1)
    assert recent.longest(prompt, "") == 0
    recent.remember(prompt, "")
    assert recent.longest(prompt + pack_u32([1] * 5000), "") == 40_000 // STEP_TOKENS * STEP_TOKENS
    assert recent.longest(prompt, "another tenant") == recent.longest(turns(40_000)(2), "") == 0
    assert recent.longest(prompt[: 4 * 1000], "") == 1000 // STEP_TOKENS * STEP_TOKENS


def test_prompts_that_were_used_last_are_remembered() -> None:
    recent = RecentPrompts(most=8)
    for seed in (1, 2, 1, 3):
        recent.remember(turns(4 * STEP_TOKENS)(seed), "")
    assert [recent.longest(turns(4 * STEP_TOKENS)(seed), "") // STEP_TOKENS for seed in (1, 2, 3)] == [4, 0, 4]
