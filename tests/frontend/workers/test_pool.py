"""frontend/workers/pool.py with several real workers: routing, and moving streams when a worker is lost."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.errors import Overloaded
from frontend.workers.connection import WorkerConnection
from frontend.workers.membership import Discovery
from frontend.workers.pool import WorkerPool
from frontend.workers.status import READY, not_ready
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import parse_all
from shared.config.settings import WireConfig
from shared.prefix_identity import prefix_keys
from shared.wire import pack_u32
from tests.patience import PATIENCE_S
from tests.wire.harness import FakeRunner, Worker, expected, sampling, until, whole


def slow() -> FakeRunner:
    return FakeRunner(delay=0.005)


@asynccontextmanager
async def pool_of(
    *workers: Worker, file: Path | None = None, ready: int | None = None, **options: Any
) -> AsyncIterator[WorkerPool]:
    """Yields a pool with these workers, once `ready` of them (None: all) are ready."""
    fixed = [] if file else parse_all(" ".join(f"ipc://{worker.folder}" for worker in workers))
    pool = WorkerPool(WireConfig(), Discovery(fixed, file), **options)
    await pool.start()
    try:
        await until(lambda: len(pool.membership.ready()) == (len(workers) if ready is None else ready))
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def two(tmp_path: Path) -> Any:
    with Worker(tmp_path / "a", runner=slow()) as a, Worker(tmp_path / "b", runner=slow()) as b:
        yield a, b
        for worker in (a, b):
            worker.scheduler.check()


async def start(pool: WorkerPool, count: int, tokens: int = 200) -> list[Stream]:
    """Starts streams with different prompts, and waits until each has some tokens."""
    streams = [await pool.submit([i, i + 1], sampling(tokens, seed=i)) for i in range(count)]
    await until(lambda: all(len(stream.output) > 3 for stream in streams))
    return streams


async def check(streams: list[Stream], tokens: int = 200) -> None:
    """Asserts that each stream has exactly the tokens that it would have alone, and the right end."""
    for i, (found, end) in enumerate(await asyncio.wait_for(asyncio.gather(*map(whole, streams)), PATIENCE_S)):
        assert found == expected([i, i + 1], tokens)
        assert (end.outcome, end.tokens, streams[i].seed) == (m.Outcome.LENGTH, tokens, i)


def at(pool: WorkerPool, index: int) -> int:
    return len(pool.membership.connections[index].streams)


def idle(worker: Worker) -> bool:
    return not worker.scheduler.has_work


async def test_frontends_learn_what_a_worker_computed_for_another_one(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two) as one, pool_of(*two) as other:
        prompt = [token % 50 for token in range(300)]
        await whole(await one.submit(prompt, sampling(2)))
        known, keys = other._router._reported, prefix_keys(pack_u32(prompt), "")
        await until(lambda: all(known.holders(key) for key in keys))
        [holder] = known.holders(keys[-1])
        [computed] = [worker for worker in two if worker.scheduler.status.prefix_queries]
        assert holder == f"ipc://{computed.folder}" and len(keys) == 2


async def test_requests_are_spread_over_workers(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two) as pool:
        streams = await start(pool, 20)
        assert (at(pool, 0), at(pool, 1)) == (10, 10)
        members = pool.membership.statuses()
        assert [member.streams for member in members] == [10, 10] and all(member.load for member in members)
        await check(streams)
        assert pool.live == pool.counters.resumed == 0


async def test_choices_and_equal_prefixes_go_to_one_worker(two: tuple[Worker, Worker]) -> None:
    async with pool_of(*two) as pool:
        choices = [await pool.submit([1, 2], sampling(500), group=7) for _ in range(4)]
        assert sorted((at(pool, 0), at(pool, 1))) == [0, 4]
        pool.abort(choices)
        beginnings = [[i % 4] * 80 for i in range(16)]  # four conversations, taking turns
        homes: dict[int, set[int]] = {}
        for prompt in beginnings:
            stream = await pool.submit(prompt, sampling(4))
            homes.setdefault(prompt[0], set()).add(0 if at(pool, 0) else 1)
            await whole(stream)
        assert all(len(where) == 1 for where in homes.values())
        assert {one for where in homes.values() for one in where} == {0, 1}


async def test_streams_of_a_dead_worker_move_to_the_other(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        streams = await start(pool, 20)
        a.kill()
        await until(lambda: pool.membership.connections[0].welcome is None)
        assert pool.membership.readiness == READY
        assert (at(pool, 0), at(pool, 1)) == (0, 20)
        again = await pool.submit([5], sampling(3))
        assert (await whole(again))[0] == expected([5], 3)
        await check(streams)
        assert (pool.counters.moved, pool.counters.lost, pool.live) == (10, 0, 0)
        await until(lambda: idle(b))


async def test_request_not_yet_admitted_moves_too(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        a.stopped = True
        a.thread.join()  # after this, the worker receives requests but answers none
        waiting = [asyncio.ensure_future(pool.submit([i], sampling(5))) for i in range(6)]
        await until(lambda: at(pool, 0) == 3)
        a.server.close()
        for i, stream in enumerate(await asyncio.gather(*waiting)):
            assert (await whole(stream))[0] == expected([i], 5)


async def test_streams_wait_when_all_workers_died_and_resume_at_the_first_one_back(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        streams = await start(pool, 8)
        a.kill()
        b.kill()
        await until(lambda: not pool.membership.readiness.ready)
        assert pool.live == 8
        with Worker(b.folder, epoch=2) as back:
            await check(streams)
            assert pool.counters.lost == 0
            await until(lambda: idle(back))


async def test_streams_that_wait_for_a_worker_end_at_once_when_the_server_stops(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        streams = await start(pool, 2)
        pool.end_waiting()
        assert pool.live == 2, "their worker lives"
        a.kill()
        b.kill()
        await until(lambda: not pool.membership.readiness.ready)
        pool.end_waiting()
        assert pool.live == 0
        assert {stream.end.outcome for stream in streams if stream.end} == {m.Outcome.SHUTDOWN}


def cut(connection: WorkerConnection) -> Any:
    """Stops all traffic in both directions, as if a cable was pulled. Returns a function that restores it."""
    connection._on_event = lambda event: None  # type: ignore[method-assign]
    connection._send = lambda message: False  # type: ignore[method-assign]

    def mend() -> None:
        del connection._on_event, connection._send

    return mend


async def test_worker_that_was_cut_off_aborts_streams_that_moved(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        streams = await start(pool, 8, tokens=1500)
        mend = cut(pool.membership.connections[0])
        await until(lambda: at(pool, 1) == 8)
        assert all(len(stream.deaths) == (stream.submit.crashes > 0) for stream in streams)
        # counted as crashes, because the pool cannot know that the worker lives
        assert sum(stream.submit.crashes for stream in streams) == 4
        pool.abort([stream for stream in streams if stream.deaths][:1])
        assert not idle(a)
        mend()
        await until(lambda: idle(a))
        assert not any(stream.deaths for stream in streams if stream.end is None)
        await until(lambda: len(pool.membership.ready()) == 2)
        again = await pool.submit([9], sampling(3))
        assert at(pool, 0) == 1 and (await whole(again))[0] == expected([9], 3)
        pool.abort(streams)
        await until(lambda: idle(b))


async def test_worker_that_dropped_the_frontend_gets_its_streams_again(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=slow(), lease_timeout=0.5) as worker:
        async with pool_of(worker) as pool:
            streams = await start(pool, 4, tokens=450)
            mend = cut(pool.membership.connections[0])
            await until(lambda: not pool.membership.readiness.ready and idle(worker))
            mend()
            await check(streams, tokens=450)
            assert pool.counters.lost == 0 and not any(stream.submit.crashes for stream in streams)
            worker.scheduler.check()


async def test_streams_of_a_stalled_worker_move_to_the_other(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b, stall_timeout=0.5) as pool:
        streams = await start(pool, 6)
        going_on = threading.Event()
        a.runner.trouble = lambda sequence: going_on.wait(PATIENCE_S) and None
        await until(lambda: at(pool, 1) == 6)
        assert "stalled" in pool.membership.connections[0].readiness.text
        going_on.set()
        await check(streams)
        await until(lambda: idle(a) and len(pool.membership.ready()) == 2)


async def test_full_worker_is_passed_over(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", runner=slow(), max_batch=1, max_waiting=1) as a,
        Worker(tmp_path / "b", runner=slow(), max_batch=1, max_waiting=1) as b,
    ):
        async with pool_of(a, b) as pool:
            first = [await pool.submit([1] * 100, sampling(400)) for _ in range(3)]  # all prompts share a prefix
            late = await pool.submit([1] * 100, sampling(400))
            with pytest.raises(Overloaded) as refused:
                await pool.submit([1] * 100, sampling(5))
            assert refused.value.code == "queue_full" and (refused.value.retry_after or 0) >= 1
            assert (at(pool, 0), at(pool, 1)) == (2, 2)
            pool.abort([*first, late])
            await until(lambda: idle(a) and idle(b))


async def test_moved_stream_waits_for_room(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", runner=slow()) as a,
        Worker(tmp_path / "b", runner=slow(), max_batch=1, max_waiting=1) as b,
    ):
        async with pool_of(a, b) as pool:
            streams = [await pool.submit([i, i + 1], sampling(60, seed=i)) for i in range(4)]
            a.kill()
            await check(streams, tokens=60)
            assert pool.counters.lost == 0
            b.scheduler.check()


async def test_draining_worker_finishes_its_streams_and_gets_nothing_new(two: tuple[Worker, Worker]) -> None:
    a, b = two
    async with pool_of(a, b) as pool:
        streams = await start(pool, 6, tokens=300)
        a.request_table.draining = True
        await until(lambda: len(pool.membership.ready()) == 1)
        assert at(pool, 0) == 3
        more = [await pool.submit([i + 6, i + 7], sampling(300, seed=i + 6)) for i in range(3)]
        assert (at(pool, 0), at(pool, 1)) == (3, 6)
        a.end()
        await check([*streams, *more], tokens=300)
        assert pool.counters.lost == 0


async def test_workers_join_and_leave_by_the_workers_file(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"ipc://{tmp_path}/a\n")
    with Worker(tmp_path / "a", runner=slow()) as a, Worker(tmp_path / "b", runner=slow()) as b:
        async with pool_of(a, file=file, resolve_s=0.05) as pool:
            streams = await start(pool, 4)
            file.write_text(f"ipc://{tmp_path}/b  # the only one now\n")
            await until(lambda: [connection.leaving for connection in pool.membership.connections] == [True, False])
            await until(lambda: len(pool.membership.ready()) == 1)
            more = [await pool.submit([i + 4, i + 5], sampling(200, seed=i + 4)) for i in range(2)]
            assert (at(pool, 0), at(pool, 1)) == (4, 2)
            await check([*streams, *more])
            await until(lambda: len(pool.membership.connections) == 1)
            assert (
                pool.counters.resumed == 0 and idle(a) and pool.membership.statuses()[0].address == f"ipc://{b.folder}"
            )


async def test_incompatible_worker_is_not_used_and_the_reason_shown(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a") as a,
        Worker(tmp_path / "b", max_seq_len=1024) as b,
        Worker(tmp_path / "c", model="other") as c,
    ):
        async with pool_of(a, b, c, ready=1, model="fake") as pool:
            connections = pool.membership.connections

            def good_one() -> WorkerConnection | None:
                """Returns the worker that is used, once all have been told; connections may be lost meanwhile."""
                reasons = {member.address: member.reason for member in pool.membership.statuses()}
                told = "'other', this frontend 'fake'" in reasons[f"ipc://{c.folder}"]
                told &= any("--max-seq-len" in reason for reason in reasons.values())
                return next((one for one in connections if told and one.readiness.ready), None)

            await until(lambda: good_one() is not None)
            good = good_one()
            assert good is not None
            {f"ipc://{a.folder}": a, f"ipc://{b.folder}": b}[good.address.name].kill()
            # the worker that decided which settings are compatible is gone, so the next worker decides
            await until(lambda: not good.readiness.ready and pool.membership.readiness.ready)


async def test_worker_of_another_protocol_version_is_incompatible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PROTOCOL_VERSION", m.PROTOCOL_VERSION + 1)
    with Worker(tmp_path) as worker:
        async with pool_of(worker, ready=0) as pool:
            said = f"the worker speaks protocol {m.PROTOCOL_VERSION - 1}, this frontend {m.PROTOCOL_VERSION}"
            await until(lambda: pool.membership.readiness == not_ready(said))
            with pytest.raises(Overloaded, match=said):
                await pool.submit([1], sampling(1))


async def test_request_in_flight_at_two_deaths_is_not_tried_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(tmp_path / name)) for name in "abc"]
        for worker in workers:  # the workers receive requests, and die before they send a token
            worker.stopped = True
            worker.thread.join()
        async with pool_of(*workers) as pool:
            poison = asyncio.ensure_future(pool.submit([1], sampling(5)))
            for _ in range(2):
                await until(lambda: bool(pool.live))
                victim = next(i for i in range(3) if at(pool, i))
                workers[victim].server.close()
                await until(lambda victim=victim: not at(pool, victim))  # type: ignore[misc]
            with pytest.raises(Overloaded, match="the worker was lost"):
                await poison
            assert len(pool.membership.ready()) == 1
        for worker in workers:
            worker.server.close()


async def test_stream_moves_only_to_a_worker_of_its_fingerprint(tmp_path: Path) -> None:
    names = {"a": "fp_1", "b": "fp_2", "c": "fp_1"}
    with ExitStack() as stack:
        a, b, c = [
            stack.enter_context(Worker(tmp_path / name, runner=slow(), fingerprint=one)) for name, one in names.items()
        ]
        async with pool_of(a, b, c) as pool:
            streams = [await pool.submit([i, i + 1], sampling(200, seed=i), fingerprint="fp_1") for i in range(8)]
            assert {stream.fingerprint for stream in streams} == {"fp_1"} and at(pool, 1) == 0
            a.kill()
            await check(streams)
            assert (pool.counters.moved > 0, pool.counters.lost, pool.membership.fingerprint) == (True, 0, "")


async def test_stream_of_a_worker_that_returns_with_another_fingerprint_fails(tmp_path: Path) -> None:
    with Worker(tmp_path / "a", runner=slow(), fingerprint="fp_1") as first:
        async with pool_of(first) as pool:
            (stream,) = await start(pool, 1)
            first.kill()
            with Worker(tmp_path / "a", epoch=2, fingerprint="fp_2"):
                tokens, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
                assert end.outcome is m.Outcome.ERROR and "computes other bits" in end.error
                assert tokens == expected([0, 1], 200)[: len(tokens)] and 0 < len(tokens) < 200
                assert pool.live == 0 and pool.membership.fingerprint == "fp_2"
                again = await pool.submit([5], sampling(3))
                assert again.fingerprint == "fp_2" and (await whole(again))[0] == expected([5], 3)


async def test_stream_waits_for_its_worker_while_only_another_fingerprint_is_ready(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", runner=slow(), fingerprint="fp_1") as first,
        Worker(tmp_path / "b", fingerprint="fp_2") as second,
    ):
        async with pool_of(first, second) as pool:
            streams = [await pool.submit([0, 1], sampling(200, seed=0), fingerprint="fp_1")]
            await until(lambda: len(streams[0].output) > 3)
            first.kill()
            await until(lambda: pool.membership.connections[0].welcome is None)
            with pytest.raises(Overloaded, match="no worker has the fingerprint fp_1"):
                await pool.submit([1], sampling(3), fingerprint="fp_1")
            assert pool.fingerprint == "fp_2" and at(pool, 1) == 0
            with Worker(tmp_path / "a", epoch=2, runner=slow(), fingerprint="fp_1"):
                await check(streams)
            assert idle(second)


async def test_places_are_those_of_all_ready_workers_or_unknown(tmp_path: Path) -> None:
    with (
        Worker(tmp_path / "a", max_waiting=5, max_batch=2) as a,
        Worker(tmp_path / "b", max_waiting=9, max_batch=4) as b,
    ):
        async with pool_of(a, b) as pool:
            assert (pool.places(), pool.places("fp_worker"), pool.places("another")) == (20, 20, 0)
