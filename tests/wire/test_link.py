"""The wire, both ends real: admission, offsets, repair, resumption, leases."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from frontend.errors import Overloaded, Unprocessable
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING
from frontend.workers.stream import Stream
from shared import messages as m
from shared.codec import decode_event, encode, pack_u32
from shared.config import ConfigError, WireConfig
from shared.sockets import bind, connect
from tests.patience import PATIENCE_S
from tests.wire.harness import FakeRunner, Worker, expected, news, sampling
from worker.schedule.sequence import Sequence

PROMPT = [5, 6, 7]


@asynccontextmanager
async def linked(wire: WireConfig, **options: float) -> AsyncIterator[WorkerPool]:
    """A fleet of one."""
    link = WorkerPool(wire, **options)
    await link.start()
    try:
        await until(lambda: link.membership.readiness.ready)
        yield link
    finally:
        await link.close()


async def until(true: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


async def whole(stream: Stream) -> tuple[list[int], m.End]:
    tokens: list[int] = []
    while True:
        batch = await news(stream)
        assert batch.start == len(tokens)
        tokens += batch.tokens
        if batch.end is not None:
            return tokens, batch.end


async def test_a_request_is_admitted_streamed_and_ended_once(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as link:
            stream = await link.submit(PROMPT, sampling(20, seed=9))
            tokens, end = await whole(stream)
            assert stream.seed == 9
            assert tokens == expected(PROMPT, 20)
            assert (end.outcome, end.tokens, link.live) == (m.Outcome.LENGTH, 20, 0)
            assert link.counters.gaps == 0


async def test_a_worker_that_has_not_been_heard_of_is_one_that_may_be_ready_at_any_moment(tmp_path: Path) -> None:
    fleet = WorkerPool(WireConfig(run_dir=str(tmp_path)))
    await fleet.start()
    assert fleet.membership.handshaking and not fleet.membership.readiness.ready
    with Worker(tmp_path) as worker:
        await until(lambda: fleet.membership.readiness.ready)
        assert not fleet.membership.handshaking
        worker.request_table.draining = True
        worker.link.refresh()
        await until(lambda: fleet.membership.readiness == DRAINING)
        assert not fleet.membership.handshaking
    await fleet.close()


async def test_many_at_once_stay_apart(tmp_path: Path) -> None:
    with Worker(tmp_path, max_batch=8, max_waiting=100) as worker:
        async with linked(worker.wire) as link:
            streams = await asyncio.gather(*(link.submit([i, i + 1], sampling(30)) for i in range(40)))
            for i, (tokens, _) in enumerate(await asyncio.gather(*map(whole, streams))):
                assert tokens == expected([i, i + 1], 30)
            worker.scheduler.check()


async def test_a_full_queue_is_refused_before_anything_else_happens(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.02), max_batch=1, max_waiting=1) as worker:
        async with linked(worker.wire) as link:
            answers = await asyncio.gather(
                *(link.submit(PROMPT, sampling(5)) for _ in range(12)), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, Overloaded)]
            served = [answer for answer in answers if isinstance(answer, Stream)]
            assert len(refused) + len(served) == 12 and refused and served
            assert all(error.code == "queue_full" and (error.retry_after or 0) >= 1 for error in refused)
            for tokens, _ in await asyncio.gather(*map(whole, served)):
                assert tokens == expected(PROMPT, 5)


async def test_what_can_never_run_is_refused_for_good(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as link:
            for prompt, new in (([1], 10**6), ([10**6], 1)):
                with pytest.raises(Unprocessable):
                    await link.submit(prompt, sampling(new))


async def test_abort_frees_at_once_and_twice_does_no_harm(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as link:
            stream = await link.submit(PROMPT, sampling(1000))
            await news(stream)
            link.abort([stream])
            link.abort([stream])
            assert stream.end is not None and stream.end.outcome is m.Outcome.ABORTED
            await until(lambda: not worker.scheduler.has_work)
            worker.scheduler.check()


async def test_lost_and_doubled_frames_are_repaired(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.002)) as worker:
        async with linked(worker.wire) as link:
            [one] = link.membership.connections
            deliver, calls = one._on_event, iter(range(10**9))

            def lossy(event: m.Event) -> None:
                if isinstance(event, m.Step) and event.ids:
                    fate = next(calls) % 5
                    for _ in range((1, 1, 0, 2, 1)[fate]):
                        deliver(event)
                else:
                    deliver(event)

            one._on_event = lossy  # type: ignore[method-assign]
            streams = [await link.submit([i], sampling(50)) for i in range(4)]
            for i, (tokens, end) in enumerate(await asyncio.gather(*map(whole, streams))):
                assert tokens == expected([i], 50)
                assert end.tokens == 50
            assert link.counters.gaps and link.counters.resyncs


async def test_a_lost_last_frame_shows_in_the_next_status(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as link:
            [one] = link.membership.connections
            deliver = one._on_event
            lost = []

            def lose_ends(event: m.Event) -> None:
                if isinstance(event, m.Step) and event.ends and not lost:
                    lost.append(event)
                else:
                    deliver(event)

            one._on_event = lose_ends  # type: ignore[method-assign]
            tokens, _ = await asyncio.wait_for(whole(await link.submit(PROMPT, sampling(5))), PATIENCE_S)
            assert lost and tokens == expected(PROMPT, 5)


async def test_streams_go_on_where_they_were_when_the_worker_comes_back(tmp_path: Path) -> None:
    first = Worker(tmp_path, epoch=1, runner=FakeRunner(delay=0.005))
    with first:
        async with linked(first.wire) as link:
            streams = [await link.submit([i], sampling(200)) for i in range(8)]
            await until(lambda: all(len(stream.output) > 10 for stream in streams))
            first.kill()
            with Worker(tmp_path, epoch=2) as second:
                for i, (tokens, end) in enumerate(await asyncio.gather(*map(whole, streams))):
                    assert tokens == expected([i], 200)
                    assert end.outcome is m.Outcome.LENGTH
                assert link.counters.resumed == 8
                second.scheduler.check()


async def test_owner_priority_and_what_is_left_of_the_deadline_outlive_a_worker(tmp_path: Path) -> None:
    first = Worker(tmp_path, epoch=1, runner=FakeRunner(delay=0.005))
    with first:
        async with linked(first.wire) as link:
            stream = await link.submit(PROMPT, sampling(1000), tenant="alice", priority=3, deadline_ms=90_000)
            stream.submitted_at -= 60.0  # so long ago
            first.kill()
            with Worker(tmp_path, epoch=2, runner=FakeRunner(delay=0.005)) as second:
                await until(lambda: bool(second.scheduler.sequences()))
                (sequence,) = second.scheduler.sequences()
                assert (sequence.tenant, sequence.priority) == ("alice", 3)
                assert 0.0 < sequence.deadline - time.monotonic() < 30.0


async def test_a_worker_that_stays_away_ends_streams_with_an_error(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire, recovery_timeout=0.5) as link:
            stream = await link.submit(PROMPT, sampling(1000))
            worker.kill()
            _, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
            assert end.outcome is m.Outcome.ERROR and "did not come back" in end.error
            with pytest.raises(Overloaded):
                await link.submit(PROMPT, sampling(1))


async def test_a_frontend_that_leaves_is_reaped(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as link:
            await link.submit(PROMPT, sampling(1500))
            assert [peer.pid for peer in worker.link.status().frontends] == [os.getpid()]
            link._placement.clear()  # as if killed: no Abort is said
            await link.close()
            await until(lambda: not worker.scheduler.has_work)
            worker.scheduler.check()
            assert (worker.link.status().frontends, worker.link.totals()["leases_reaped"]) == ((), 1)


async def test_an_old_connection_that_breaks_takes_along_nobody_who_has_come_back(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker, zmq.Context() as context:
        async with linked(worker.wire):
            id = bytes.fromhex(worker.link.status().frontends[0].id)
            old = connect(context, zmq.SUB, worker.wire.events, worker.wire)
            old.subscribe(id)
            await until(lambda: worker.link._subscribers[id] == 2)
            old.close()
            await until(lambda: worker.link._subscribers[id] == 1)
            assert worker.link.totals()["leases_reaped"] == 0


def test_a_host_that_does_not_answer_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system alone would wait for two minutes. A listener whose queue is full swallows what comes."""
    monkeypatch.setattr("shared.sockets.CONNECT_MS", 100)
    with socket.socket() as deaf, socket.socket() as first, zmq.Context() as context:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        first.connect(deaf.getsockname())
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with connect(context, zmq.DEALER, address, WireConfig(insecure=True)) as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
            assert monitor.poll(10_000), "asked once"
            sock.disable_monitor()
            monitor.close()


def test_whoever_scrapes_a_worker_whose_loop_stands_still_sees_it(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        worker.stopped = True
        worker.thread.join()
        ages = [worker.link.status().last_step_age_s]
        time.sleep(0.05)
        ages.append(worker.link.status().last_step_age_s)
        worker.link.close()
    assert ages[1] - ages[0] >= 0.05


async def test_only_the_culprit_of_a_failing_step_fails(tmp_path: Path) -> None:
    def trouble(sequence: Sequence) -> None:
        if sequence.tokens[0] == 13:
            raise RuntimeError("unlucky")

    with Worker(tmp_path, runner=FakeRunner(trouble=trouble)) as worker:
        async with linked(worker.wire) as link:
            streams = [await link.submit([i], sampling(20)) for i in (11, 12, 13, 14)]
            ends = {stream.submit.prompt: await whole(stream) for stream in streams}
            for i in (11, 12, 14):
                assert ends[pack_u32([i])][0] == expected([i], 20)
            tokens, end = ends[pack_u32([13])]
            assert tokens == [] and end.outcome is m.Outcome.ERROR and "unlucky" in end.error
            worker.scheduler.check()


async def test_shutdown_is_said(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as link:
            stream = await link.submit(PROMPT, sampling(1000))
            await link.close()
            _, end = await whole(stream)
            assert end.outcome is m.Outcome.SHUTDOWN


async def test_garbage_is_counted_and_survived(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(worker.wire.requests)
        for frame in (b"", b"\xff" * 50, encode(m.Lease(1)), encode(m.Submit(1, b"abc", sampling(1)))):
            stranger.send(frame)
        await until(lambda: worker.link.counters.garbage == 4)
        async with linked(worker.wire) as link:
            tokens, _ = await whole(await link.submit(PROMPT, sampling(3)))
            assert tokens == expected(PROMPT, 3)
        stranger.close(linger=0)
        context.term()


def test_sockets_are_closed_to_strangers(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match="--curve-dir"):
        bind(context, zmq.ROUTER, "tcp://127.0.0.1:*", WireConfig())
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="0700"):
        bind(context, zmq.ROUTER, f"ipc://{tmp_path}/s", WireConfig())
    context.term()


async def test_another_protocol_is_answered_each_time_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Worker(tmp_path) as worker, zmq.Context() as context:
        requests = connect(context, zmq.DEALER, worker.wire.requests, worker.wire, identity=b"stranger")
        events = connect(context, zmq.SUB, worker.wire.events, worker.wire)
        events.subscribe(b"stranger")
        heard: list[m.Event] = []

        def answered() -> bool:
            with contextlib.suppress(zmq.Again):
                requests.send(encode(m.Hello(7, 4711, version=99, host="elsewhere")), zmq.NOBLOCK)
                heard.append(decode_event(events.recv_multipart(zmq.NOBLOCK)[-1]))
            return len(heard) > 3

        await until(answered)
        assert {event.version for event in heard if isinstance(event, m.Welcome)} == {m.PROTOCOL_VERSION}
        assert not worker.link._peers, "nobody the worker could serve"
        said = [record.getMessage() for record in caplog.records if "speaks protocol" in record.getMessage()]
        assert len(said) == 1 and "(process 4711 on elsewhere) speaks protocol 99, not" in said[0]
        requests.close()
        events.close()
