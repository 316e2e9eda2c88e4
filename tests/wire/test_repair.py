"""Messages lost on the way to the worker, and streams that the worker dropped, are repaired."""

import asyncio
from pathlib import Path
from typing import Any

import zmq

from frontend.workers.connection import WorkerConnection
from frontend.workers.pool import WorkerPool
from shared import messages as m
from shared.wire import decode_request, encode, pack_u32
from tests.patience import PATIENCE_S
from tests.wire.harness import PROMPT, FakeRunner, Worker, expected, linked, next_batch, sampling, until, whole


class Leaky:
    """A request socket that loses the first `count` messages of one type."""

    def __init__(self, connection: WorkerConnection, kind: type[m.Request], count: int) -> None:
        self._sock: Any = connection._requests
        self._kind, self._left = kind, count
        connection._requests = self  # type: ignore[assignment]

    def send(self, body: bytes, flags: int) -> None:
        if self._left and isinstance(decode_request(body), self._kind):
            self._left -= 1
        else:
            self._sock.send(body, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def only(pool: WorkerPool) -> WorkerConnection:
    [connection] = pool.membership.connections
    return connection


async def test_lost_submit_is_sent_again(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            Leaky(only(pool), m.Submit, 2)
            tokens, _ = await whole(await asyncio.wait_for(pool.submit(PROMPT, sampling(20)), PATIENCE_S))
            assert tokens == expected(PROMPT, 20)


async def test_lost_submit_of_a_resumed_stream_is_sent_again(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as first:
        async with linked(first.wire) as pool:
            streams = [await pool.submit([i], sampling(100)) for i in range(3)]
            await until(lambda: all(len(stream.output) > 10 for stream in streams))
            first.kill()
            Leaky(only(pool), m.Submit, 2)
            with Worker(tmp_path, epoch=2):
                for i, stream in enumerate(streams):
                    assert (await asyncio.wait_for(whole(stream), PATIENCE_S))[0] == expected([i], 100)


async def test_lease_replaces_a_lost_abort(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.01)) as worker:
        async with linked(worker.wire) as pool:
            Leaky(only(pool), m.Abort, 1)
            stays, leaves = [await pool.submit([i], sampling(1500)) for i in range(2)]
            await next_batch(leaves)
            pool.abort([leaves])
            await until(lambda: worker.scheduler.status.running == 1)
            pool.abort([stays])
            await until(lambda: not worker.scheduler.has_work)
            worker.scheduler.check()


async def test_stream_unknown_to_the_worker_is_submitted_again(tmp_path: Path) -> None:
    """The worker drops the stream and sends a new Welcome, as if a lease had expired unnoticed."""
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as pool:
            stream = await pool.submit(PROMPT, sampling(200))
            await until(lambda: len(stream.output) > 10)
            worker.server._remove(pool.id)
            worker.server._welcome(pool.id, m.Hello(1, 1))
            tokens, end = await asyncio.wait_for(whole(stream), PATIENCE_S)
            assert tokens == expected(PROMPT, 200) and end.outcome is m.Outcome.LENGTH
            worker.scheduler.check()


async def test_last_frames_of_a_closing_worker_arrive(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            heard: list[m.Event] = []
            only(pool)._on_event = heard.append  # type: ignore[method-assign, assignment]
            worker.stopped = True
            worker.thread.join()
            for _ in range(30):
                worker.server.publish(pool.id, m.Step(1, 0))
            worker.server.close()
            await until(lambda: sum(isinstance(event, m.Step) for event in heard) == 30)


async def test_numbers_beyond_32_bits_are_garbage(tmp_path: Path) -> None:
    wrong = [
        m.Resync(1, -1), m.Resync(1 << 32, 0), m.Abort((-1,)), m.Submit(1 << 40, pack_u32([1]), sampling(1)),
        m.Submit(1, pack_u32([1]), sampling(1), original_id=-1), m.Lease(0, 1 << 32),
    ]  # fmt: skip
    with Worker(tmp_path) as worker:
        async with linked(worker.wire) as pool:
            for message in wrong:
                only(pool)._requests.send(encode(message), zmq.NOBLOCK)
            await until(lambda: worker.server.counters.garbage == len(wrong))
            assert (await whole(await pool.submit(PROMPT, sampling(5))))[0] == expected(PROMPT, 5)
