"""worker/engine/transport.py, with real frontends."""

import contextlib
import os
import time
from pathlib import Path

import pytest
import zmq

from shared import messages as m
from shared.wire import connect, decode_event, encode
from tests.wire.harness import PROMPT, FakeRunner, Worker, expected, linked, sampling, until, whole


async def test_frontend_that_leaves_is_reaped(tmp_path: Path) -> None:
    with Worker(tmp_path, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(worker.wire) as pool:
            await pool.submit(PROMPT, sampling(1500))
            assert [peer.pid for peer in worker.server.status().frontends] == [os.getpid()]
            pool._placement.clear()  # as if killed: no Abort is sent
            await pool.close()
            await until(lambda: not worker.scheduler.has_work)
            worker.scheduler.check()
            assert (worker.server.status().frontends, worker.server.totals()["leases_reaped"]) == ((), 1)


async def test_old_connection_that_breaks_does_not_reap_a_reconnected_frontend(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker, zmq.Context() as context:
        async with linked(worker.wire):
            id = bytes.fromhex(worker.server.status().frontends[0].id)
            old = connect(context, zmq.SUB, worker.wire.events, worker.wire)
            old.subscribe(id)
            await until(lambda: worker.server._subscribers[id] == 2)
            old.close()
            await until(lambda: worker.server._subscribers[id] == 1)
            assert worker.server.totals()["leases_reaped"] == 0


def test_status_shows_the_age_of_a_loop_that_stands_still(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        worker.stopped = True
        worker.thread.join()
        ages = [worker.server.status().last_step_age_s]
        time.sleep(0.05)
        ages.append(worker.server.status().last_step_age_s)
        worker.server.close()
    assert ages[1] - ages[0] >= 0.05


async def test_garbage_is_counted_and_harmless(tmp_path: Path) -> None:
    with Worker(tmp_path) as worker:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(worker.wire.requests)
        for frame in (b"", b"\xff" * 50, encode(m.Lease(1)), encode(m.Submit(1, b"abc", sampling(1)))):
            stranger.send(frame)
        await until(lambda: worker.server.counters.garbage == 4)
        async with linked(worker.wire) as pool:
            tokens, _ = await whole(await pool.submit(PROMPT, sampling(3)))
            assert tokens == expected(PROMPT, 3)
        stranger.close(linger=0)
        context.term()


async def test_hello_of_another_protocol_version_is_answered_and_logged_once(
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
        assert not worker.server._peers, "nobody the worker could serve"
        said = [record.getMessage() for record in caplog.records if "speaks protocol" in record.getMessage()]
        assert len(said) == 1 and "(process 4711 on elsewhere) speaks protocol 99, not" in said[0]
        requests.close()
        events.close()
