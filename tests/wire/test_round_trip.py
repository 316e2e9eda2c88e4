"""Frontend and worker over real sockets: admission, offsets, repair, resumption."""

import asyncio
import time
from pathlib import Path

import pytest

from frontend.errors import Overloaded, Unprocessable
from frontend.routes.health import reset_prefix_caches
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING
from frontend.workers.stream import Stream
from shared import messages as m
from shared.config.settings import WireConfig
from shared.wire import pack_u32
from tests.patience import PATIENCE_S
from tests.wire.harness import PROMPT, FakeRunner, Worker, expected, linked, next_batch, sampling, until, whole
from worker.scheduler.sequence import Sequence


async def test_request_is_admitted_streamed_and_ended_once(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            stream = await pool.submit(PROMPT, sampling(20, seed=9))
            tokens, end = await whole(stream)
            assert stream.seed == 9
            assert tokens == expected(PROMPT, 20)
            assert (end.outcome, end.tokens, pool.live) == (m.Outcome.LENGTH, 20, 0)
            assert pool.counters.gaps == 0


async def test_pool_is_handshaking_until_its_worker_is_ready(tmp_path: Path) -> None:
    pool = WorkerPool(WireConfig(run_dir=str(tmp_path)))
    await pool.start()
    assert pool.membership.handshaking and not pool.membership.readiness.ready
    with Worker(tmp_path) as worker:
        await until(lambda: pool.membership.readiness.ready)
        assert not pool.membership.handshaking
        worker.request_table.draining = True
        worker.server.refresh()
        await until(lambda: pool.membership.readiness == DRAINING)
        assert not pool.membership.handshaking
    await pool.close()


async def test_concurrent_requests_get_their_own_tokens(tmp_path: Path) -> None:
    with Worker(tmp_path, max_batch=8, max_waiting=100) as worker:
        async with linked(worker.wire) as pool:
            streams = await asyncio.gather(*(pool.submit([i, i + 1], sampling(30)) for i in range(40)))
            for i, (tokens, _) in enumerate(await asyncio.gather(*map(whole, streams))):
                assert tokens == expected([i, i + 1], 30)
            worker.scheduler.check()


async def test_full_queue_refuses_the_request_with_retry_after(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.02), max_batch=1, max_waiting=1) as worker:
        async with linked(worker.wire) as pool:
            answers = await asyncio.gather(
                *(pool.submit(PROMPT, sampling(5)) for _ in range(12)), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, Overloaded)]
            served = [answer for answer in answers if isinstance(answer, Stream)]
            assert len(refused) + len(served) == 12 and refused and served
            assert all(error.code == "queue_full" and (error.retry_after or 0) >= 1 for error in refused)
            for tokens, _ in await asyncio.gather(*map(whole, served)):
                assert tokens == expected(PROMPT, 5)


async def test_request_beyond_the_limits_is_unprocessable(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            for prompt, new in (([1], 10**6), ([10**6], 1)):
                with pytest.raises(Unprocessable):
                    await pool.submit(prompt, sampling(new))


async def test_abort_frees_at_once_and_is_idempotent(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as pool:
            stream = await pool.submit(PROMPT, sampling(1000))
            await next_batch(stream)
            pool.abort([stream])
            pool.abort([stream])
            assert stream.end is not None and stream.end.outcome is m.Outcome.ABORTED
            await until(lambda: not worker.scheduler.has_work)
            worker.scheduler.check()


async def test_lost_and_duplicate_frames_are_repaired(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.002)) as worker:
        async with linked(worker.wire) as pool:
            [connection] = pool.membership.connections
            deliver, calls = connection._on_event, iter(range(10**9))

            def lossy(event: m.Event) -> None:
                if isinstance(event, m.Step) and event.ids:
                    fate = next(calls) % 5
                    for _ in range((1, 1, 0, 2, 1)[fate]):
                        deliver(event)
                else:
                    deliver(event)

            connection._on_event = lossy  # type: ignore[method-assign]
            streams = [await pool.submit([i], sampling(50)) for i in range(4)]
            for i, (tokens, end) in enumerate(await asyncio.gather(*map(whole, streams))):
                assert tokens == expected([i], 50)
                assert end.tokens == 50
            assert pool.counters.gaps and pool.counters.resyncs


async def test_lost_last_frame_is_detected_by_the_next_status(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            [connection] = pool.membership.connections
            deliver = connection._on_event
            lost = []

            def lose_ends(event: m.Event) -> None:
                if isinstance(event, m.Step) and event.ends and not lost:
                    lost.append(event)
                else:
                    deliver(event)

            connection._on_event = lose_ends  # type: ignore[method-assign]
            tokens, _ = await asyncio.wait_for(whole(await pool.submit(PROMPT, sampling(5))), PATIENCE_S)
            assert lost and tokens == expected(PROMPT, 5)


async def test_streams_resume_at_the_restarted_worker(tmp_path: Path) -> None:
    first = Worker(tmp_path, epoch=1, runner=FakeRunner(delay=0.005))
    with first:
        async with linked(first.wire) as pool:
            streams = [await pool.submit([i], sampling(200)) for i in range(8)]
            await until(lambda: all(len(stream.output) > 10 for stream in streams))
            first.kill()
            with Worker(tmp_path, epoch=2) as second:
                for i, (tokens, end) in enumerate(await asyncio.gather(*map(whole, streams))):
                    assert tokens == expected([i], 200)
                    assert end.outcome is m.Outcome.LENGTH
                assert pool.counters.resumed == 8
                second.scheduler.check()


async def test_resumed_stream_keeps_tenant_priority_and_remaining_deadline(tmp_path: Path) -> None:
    first = Worker(tmp_path, epoch=1, runner=FakeRunner(delay=0.005))
    with first:
        async with linked(first.wire) as pool:
            stream = await pool.submit(PROMPT, sampling(1000), tenant="alice", priority=3, deadline_ms=90_000)
            stream.submitted_at -= 60.0  # pretends that the stream was submitted a minute ago
            first.kill()
            with Worker(tmp_path, epoch=2, runner=FakeRunner(delay=0.005)) as second:
                await until(lambda: bool(second.scheduler.sequences()))
                (sequence,) = second.scheduler.sequences()
                assert (sequence.turn.tenant, sequence.turn.priority) == ("alice", 3)
                assert 0.0 < sequence.turn.deadline - time.monotonic() < 30.0


async def test_streams_of_a_worker_that_stays_away_fail(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire, recovery_timeout=0.5) as pool:
            stream = await pool.submit(PROMPT, sampling(1000))
            worker.kill()
            _, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
            assert end.outcome is m.Outcome.ERROR and "did not come back" in end.error
            with pytest.raises(Overloaded):
                await pool.submit(PROMPT, sampling(1))


async def test_only_the_sequence_that_breaks_a_step_fails(tmp_path: Path) -> None:
    def trouble(sequence: Sequence) -> None:
        if sequence.tokens[0] == 13:
            raise RuntimeError("unlucky")

    with Worker(tmp_path, runner=FakeRunner(trouble=trouble)) as worker:
        async with linked(worker.wire) as pool:
            streams = [await pool.submit([i], sampling(20)) for i in (11, 12, 13, 14)]
            ends = {stream.submit.prompt: await whole(stream) for stream in streams}
            for i in (11, 12, 14):
                assert ends[pack_u32([i])][0] == expected([i], 20)
            tokens, end = ends[pack_u32([13])]
            assert tokens == [] and end.outcome is m.Outcome.ERROR and "unlucky" in end.error
            worker.scheduler.check()


async def test_closed_pool_ends_its_streams_with_shutdown(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as pool:
            stream = await pool.submit(PROMPT, sampling(1000))
            await pool.close()
            _, end = await whole(stream)
            assert end.outcome is m.Outcome.SHUTDOWN


async def test_reset_of_the_prefix_cache_is_confirmed_by_every_frontends_status(tmp_path: Path) -> None:
    prompt = list(range(64))
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool, linked(worker.wire) as other:
            for _ in range(2):
                await whole(await pool.submit(prompt, sampling(2)))
            assert worker.scheduler.status.prefix_hits == 48
            assert await asyncio.gather(
                reset_prefix_caches(pool.membership), reset_prefix_caches(other.membership)
            ) == [1, 1]
            assert worker.pool.counts().cached == 0
            await whole(await pool.submit(prompt, sampling(2)))
            assert worker.scheduler.status.prefix_hits == 48, "no further hit"


async def test_reset_of_a_lost_worker_is_not_confirmed(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            worker.kill()
            with pytest.raises(Overloaded):
                await reset_prefix_caches(pool.membership, 0.3)
