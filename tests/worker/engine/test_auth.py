"""worker/engine/transport.py checks keys over tcp, with real sockets."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from deploy.cli.keygen import make_keys
from frontend.workers.pool import WorkerPool
from shared import messages as m
from shared.config.settings import WireConfig
from shared.wire import encode, keys_for
from tests.wire.harness import PROMPT, FakeRunner, Worker, expected, next_batch, sampling, until


def addresses() -> dict[str, str]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    return {"request_address": f"tcp://127.0.0.1:{ports[0]}", "event_address": f"tcp://127.0.0.1:{ports[1]}"}


def host(folder: Path, keys: Path, name: str) -> Path:
    """Makes a folder with the files that are copied to the host of frontend `name`."""
    folder.mkdir()
    shutil.copy(keys / f"{name}.key_secret", folder / "frontend.key_secret")
    shutil.copy(keys / "worker.key", folder)
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", "worker", "frontend")
    return tmp_path / "keys"


@pytest.fixture
def wire(keys: Path) -> WireConfig:
    return WireConfig(**addresses(), curve_dir=str(keys))


@asynccontextmanager
async def linked(wire: WireConfig) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(wire)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def silent(pool: WorkerPool) -> bool:
    return all(one.status is None and one.welcome is None for one in pool.membership.connections)


async def answer(pool: WorkerPool, count: int) -> list[int]:
    stream = await pool.submit(PROMPT, sampling(count))
    while (await next_batch(stream)).end is None:
        pass
    return stream.output


async def test_unknown_key_receives_nothing_until_it_is_allowed(tmp_path: Path, keys: Path, wire: WireConfig) -> None:
    make_keys(keys, "second")
    allowed = keys / "allowed" / "second.key"
    allowed.rename(tmp_path / "second.key")
    second = replace(wire, curve_dir=str(host(tmp_path / "host", keys, "second")))
    with Worker(tmp_path / "run", over=wire) as worker:
        async with linked(wire) as pool, linked(second) as stranger:
            await until(lambda: pool.membership.readiness.ready)
            assert await answer(pool, 20) == expected(PROMPT, 20)
            await until(lambda: worker.server.totals()["wire_refused"] >= 2)
            assert silent(stranger)  # the stranger gets no message, not even a Status
            (tmp_path / "second.key").rename(allowed)
            await until(lambda: stranger.membership.readiness.ready)
            assert await answer(stranger, 5) == expected(PROMPT, 5)


async def test_revoked_key_is_cut_off_and_stays_out(tmp_path: Path, keys: Path, wire: WireConfig) -> None:
    with Worker(tmp_path / "run", over=wire, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(wire) as pool:
            await until(lambda: pool.membership.readiness.ready)
            stream = await pool.submit(PROMPT, sampling(1500))
            await next_batch(stream)
            (keys / "allowed" / "frontend.key").unlink()
            await until(lambda: not worker.scheduler.has_work)  # the worker cuts the connected frontend off
            assert stream.end is None
        async with linked(wire) as pool:
            before = worker.server.totals()["wire_refused"]
            await until(lambda: worker.server.totals()["wire_refused"] > before)
            assert silent(pool) and not pool.membership.readiness.ready


async def test_frontend_without_keys_or_with_another_workers_key_receives_nothing(
    tmp_path: Path, keys: Path, wire: WireConfig
) -> None:
    make_keys(tmp_path / "others", "worker", "frontend")
    wrong = replace(wire, curve_dir=str(host(tmp_path / "host", keys, "frontend")))
    shutil.copy(tmp_path / "others" / "worker.key", tmp_path / "host")
    with Worker(tmp_path / "run", over=wire):
        async with (
            linked(replace(wire, insecure=True)) as plain,
            linked(wrong) as misled,
            linked(wire) as pool,
        ):
            await until(lambda: pool.membership.readiness.ready)
            await asyncio.sleep(0.5)
            assert silent(plain) and silent(misled)
            assert await answer(pool, 3) == expected(PROMPT, 3)


async def test_garbage_from_an_allowed_key_is_counted(tmp_path: Path, keys: Path, wire: WireConfig) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(tmp_path / "run", over=wire) as worker:
        sock = context.socket(zmq.DEALER)
        mine = keys_for(wire.requests, wire, worker=False)
        assert mine is not None
        sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = mine.public, mine.secret, mine.worker
        sock.connect(wire.requests)
        for frame in (b"", b"\xff" * 50, encode(m.Lease(1)), encode(m.Submit(1, b"abc", sampling(1)))):
            sock.send(frame)
        await until(lambda: worker.server.totals()["wire_garbage"] == 4)
        async with linked(wire) as pool:
            await until(lambda: pool.membership.readiness.ready)
            assert await answer(pool, 3) == expected(PROMPT, 3)
        sock.close(linger=0)
    context.term()
