"""Keys over tcp, with real sockets: who gets in, who does not, and what is said of keys that cannot be used."""

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from deploy.cli.keygen import make_keys
from deploy.cli.main import main
from frontend.workers.pool import WorkerPool
from shared import messages as m
from shared.codec import encode
from shared.config import ConfigError, WireConfig
from shared.curve import keys_for
from tests.patience import PATIENCE_S
from tests.wire.harness import FakeRunner, Worker, expected, news, sampling

PROMPT = [5, 6, 7]


def addresses() -> dict[str, str]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    return {"request_address": f"tcp://127.0.0.1:{ports[0]}", "event_address": f"tcp://127.0.0.1:{ports[1]}"}


def host(folder: Path, keys: Path, name: str) -> Path:
    """What is copied to the host of frontend `name`."""
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
    link = WorkerPool(wire)
    await link.start()
    try:
        yield link
    finally:
        await link.close()


async def until(true: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def silent(link: WorkerPool) -> bool:
    return all(one.status is None and one.welcome is None for one in link.membership.connections)


async def answer(link: WorkerPool, count: int) -> list[int]:
    stream = await link.submit(PROMPT, sampling(count))
    while (await news(stream)).end is None:
        pass
    return stream.output


async def test_a_known_key_gets_in_and_an_unknown_one_hears_nothing_until_it_is_allowed(
    tmp_path: Path, keys: Path, wire: WireConfig
) -> None:
    make_keys(keys, "second")
    allowed = keys / "allowed" / "second.key"
    allowed.rename(tmp_path / "second.key")
    second = replace(wire, curve_dir=str(host(tmp_path / "host", keys, "second")))
    with Worker(tmp_path / "run", over=wire) as worker:
        async with linked(wire) as link, linked(second) as stranger:
            await until(lambda: link.membership.readiness.ready)
            assert await answer(link, 20) == expected(PROMPT, 20)
            await until(lambda: worker.link.totals()["wire_refused"] >= 2)
            assert silent(stranger)  # not even a Status
            (tmp_path / "second.key").rename(allowed)
            await until(lambda: stranger.membership.readiness.ready)
            assert await answer(stranger, 5) == expected(PROMPT, 5)


async def test_a_revoked_key_is_cut_off_and_does_not_come_back(tmp_path: Path, keys: Path, wire: WireConfig) -> None:
    with Worker(tmp_path / "run", over=wire, runner=FakeRunner(delay=0.005)) as worker:
        async with linked(wire) as link:
            await until(lambda: link.membership.readiness.ready)
            stream = await link.submit(PROMPT, sampling(1500))
            await news(stream)
            (keys / "allowed" / "frontend.key").unlink()
            await until(lambda: not worker.scheduler.has_work)  # while connected
            assert stream.end is None
        async with linked(wire) as link:
            before = worker.link.totals()["wire_refused"]
            await until(lambda: worker.link.totals()["wire_refused"] > before)
            assert silent(link) and not link.membership.readiness.ready


async def test_a_client_without_keys_and_one_with_the_wrong_worker_are_refused(
    tmp_path: Path, keys: Path, wire: WireConfig
) -> None:
    make_keys(tmp_path / "others", "worker", "frontend")
    wrong = replace(wire, curve_dir=str(host(tmp_path / "host", keys, "frontend")))
    shutil.copy(tmp_path / "others" / "worker.key", tmp_path / "host")
    with Worker(tmp_path / "run", over=wire):
        async with (
            linked(replace(wire, insecure=True)) as plain,
            linked(wrong) as misled,
            linked(wire) as link,
        ):
            await until(lambda: link.membership.readiness.ready)
            await asyncio.sleep(0.5)
            assert silent(plain) and silent(misled)
            assert await answer(link, 3) == expected(PROMPT, 3)


async def test_garbage_from_a_known_key_is_dropped_and_counted(tmp_path: Path, keys: Path, wire: WireConfig) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Worker(tmp_path / "run", over=wire) as worker:
        sock = context.socket(zmq.DEALER)
        mine = keys_for(wire.requests, wire, worker=False)
        assert mine is not None
        sock.curve_publickey, sock.curve_secretkey, sock.curve_serverkey = mine.public, mine.secret, mine.worker
        sock.connect(wire.requests)
        for frame in (b"", b"\xff" * 50, encode(m.Lease(1)), encode(m.Submit(1, b"abc", sampling(1)))):
            sock.send(frame)
        await until(lambda: worker.link.totals()["wire_garbage"] == 4)
        async with linked(wire) as link:
            await until(lambda: link.membership.readiness.ready)
            assert await answer(link, 3) == expected(PROMPT, 3)
        sock.close(linger=0)
    context.term()


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text)


@pytest.mark.parametrize(
    ("spoil", "worker", "said"),
    [
        (lambda folder: shutil.rmtree(folder), True, "allowed"),
        (lambda folder: shutil.rmtree(folder / "allowed"), True, "there is no folder .*allowed"),
        (remove("worker.key_secret"), True, "cannot read the key .*worker.key_secret: No such file"),
        (remove("frontend.key_secret"), False, "cannot read the key .*frontend.key_secret"),
        (remove("worker.key"), False, "cannot read the key .*worker.key"),
        (lambda folder: (folder / "worker.key_secret").chmod(0o640), True, "others may read .*worker.key_secret"),
        (write("worker.key_secret", b""), True, "worker.key_secret is no key"),
        (write("worker.key", b"\xff\xfe\x00"), False, "worker.key is no key"),
        (write("worker.key", b'public-key = "' + b"~" * 40 + b'"'), False, "worker.key is no key"),
        (lambda folder: (folder / "worker.key").replace(folder / "worker.key_secret"), True, "do.* not hold a pair"),
    ],
)
def test_keys_that_cannot_be_used_are_told_in_one_sentence(
    keys: Path, wire: WireConfig, spoil: Callable[[Path], object], worker: bool, said: str
) -> None:
    assert keys_for(wire.requests, wire, worker=worker) is not None
    spoil(keys)
    with pytest.raises(ConfigError, match=f"--curve-dir: .*{said}"):
        keys_for(wire.requests, wire, worker=worker)


def test_a_file_that_is_no_key_allows_nobody_and_harms_nobody(keys: Path, wire: WireConfig) -> None:
    from shared.curve import allowed_keys

    (keys / "allowed" / "notes.key").write_bytes(b"\xff")
    (keys / "allowed" / "folder.key").mkdir()
    assert len(allowed_keys(wire)) == 1


def test_keygen_makes_private_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keygen", str(folder)]) == 0
    assert "copy to the worker's host" in capsys.readouterr().out
    secret = (folder / "worker.key_secret").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "allowed")} == {0o700}
    assert sorted(path.name for path in folder.rglob("*.key*")) == sorted(
        ["worker.key", "worker.key_secret", "frontend.key", "frontend.key_secret", "frontend.key"]
    )
    assert main(["keygen", str(folder)]) == 1
    assert "--force replaces them" in capsys.readouterr().err
    assert main(["keygen", str(folder), "--add", "b"]) == 0
    assert (folder / "worker.key_secret").read_bytes() == secret and (folder / "allowed" / "b.key").is_file()
    assert main(["keygen", str(folder), "--force"]) == 0
    assert (folder / "worker.key_secret").read_bytes() != secret
    assert main(["keygen", str(folder), "--add", "../b"]) == 2
    assert main(["keygen", "/proc/nowhere"]) == 1


def test_tcp_without_keys_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={address}" for name, address in addresses().items()]
    for command in ("worker", "frontend", "serve"):
        assert main([command, *flags]) == 2
        assert "--curve-dir, or --insecure" in capsys.readouterr().err
