"""The supervisor, with small scripts in the place of worker and frontends."""

import asyncio
import contextlib
import errno
import io
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from deploy.supervisor import serve
from deploy.supervisor.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from deploy.supervisor.child_process import Backoff, ChildSpec
from deploy.supervisor.console import Console
from deploy.supervisor.listen_sockets import listen, reachable
from deploy.supervisor.placement import WorkerPlacement
from deploy.supervisor.run_dir import RunDirError, reserve_metrics
from deploy.supervisor.serve import report_readiness, watchdog_for
from deploy.supervisor.supervisor import Supervisor
from shared.config import Settings, with_values
from shared.flags import Parser, add_flags, read
from shared.settings_check import check
from tests.patience import PATIENCE_S

UNTIL_TERM = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({code})); print('up', flush=True)\n"
WAIT = "while True: signal.pause()\n"


def script(name: str, code: str, fds: tuple[int, ...] = ()) -> ChildSpec:
    """A child that runs `code`; N is the number of the incarnation."""
    command = [sys.executable, "-I", "-S", "-c"]
    return ChildSpec(name, lambda n: [*command, f"N = {n}\n{code}"], lambda n: dict(os.environ), fds)


def lasting(name: str = "worker", code: int = 0) -> ChildSpec:
    return script(name, UNTIL_TERM.format(code=code) + WAIT)


class Running:
    """A supervisor at work and what it has written so far."""

    def __init__(self, *roles: ChildSpec, stop_timeout: float = 10.0) -> None:
        self.output = io.StringIO()
        self.gone: list[int] = []
        self.supervisor = Supervisor(
            roles,
            Console(self.output, tuple(role.name for role in roles)),
            stop_timeout=stop_timeout,
            backoff=lambda: Backoff(first=0.01, longest=0.02),
            on_exit=self.gone.append,
        )
        self.task = asyncio.create_task(self.supervisor.run())

    @property
    def text(self) -> str:
        return self.output.getvalue()

    async def until(self, *words: str) -> None:
        await until(lambda: all(word in self.text for word in words), lambda: self.text)

    async def result(self) -> int:
        return await asyncio.wait_for(self.task, PATIENCE_S)


async def until(happened: Callable[[], bool], tell: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"never happened; {tell()}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(*roles: ChildSpec, stop_timeout: float = 10.0) -> AsyncIterator[Running]:
    started = Running(*roles, stop_timeout=stop_timeout)
    try:
        yield started
    finally:
        started.supervisor.request_stop()
        started.supervisor.request_stop()
        await asyncio.wait_for(asyncio.wait([started.task]), PATIENCE_S)


async def test_what_dies_is_started_again_with_the_next_number() -> None:
    flaky = script(
        "worker", "print('life', N, flush=True)\nif N < 3: raise SystemExit(1)\nimport signal; signal.pause()"
    )
    async with running(flaky, lasting("frontend 0")) as run:
        await run.until("life 1", "life 2", "life 3")
        assert run.text.count("worker ended with exit code 1; restarting in") == 2
        assert run.text.count("up") == 1, "the frontend was left alone"
        assert len(set(run.gone)) == 2


async def test_a_child_killed_by_a_signal_is_started_again_and_the_log_says_how_it_went() -> None:
    async with running(lasting()) as run:
        await run.until("up")
        run.supervisor.children[0].kill()
        await run.until("worker was killed by SIGKILL")
        await until(lambda: run.text.count("up") == 2)


def test_pauses_double_up_to_a_limit_and_shrink_after_a_healthy_life() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff.after(60), backoff.after(59)] == [0.5, 1]


async def test_who_served_is_started_again_at_once() -> None:
    dying = script("worker", "import time; print('life', N, flush=True); time.sleep(0.3); raise SystemExit(1)")
    async with running(dying) as run:
        child = run.supervisor.children[0]
        child._backoff = Backoff(first=0.01, longest=3600.0, _next=3600.0)
        for n in range(1, 4):  # without it the second life would begin in an hour
            await run.until(f"life {n}")
            run.supervisor.mark_ready()
        run.supervisor.request_stop()


@pytest.mark.parametrize("code", [2, 3])
async def test_what_will_not_get_better_ends_everything_with_its_code_and_its_sentence(code: int) -> None:
    broken = script("worker", f"import sys; print('sluice worker: no weights'); sys.exit({code})")
    async with running(lasting("frontend 0"), broken) as run:
        assert await run.result() == code
        assert "sluice serve: worker cannot start: no weights" in run.text.splitlines()


async def test_once_it_was_ready_no_exit_code_is_final() -> None:
    async with running(script("worker", UNTIL_TERM.format(code=0) + "if N > 1: signal.pause()\nsys.exit(3)")) as run:
        run.supervisor.ready_once = True
        await until(lambda: run.text.count("up") == 2, lambda: run.text)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_passed_on_and_a_good_end_is_zero(signum: int) -> None:
    async with running(lasting(), lasting("frontend 0")) as run:
        await until(lambda: run.text.count("up") == 2)
        os.kill(os.getpid(), signum)
        assert await run.result() == 0
        assert "restarting" not in run.text


async def test_a_bad_end_is_not_zero() -> None:
    async with running(lasting(code=7), lasting("frontend 0")) as run:
        await until(lambda: run.text.count("up") == 2)
        run.supervisor.request_stop()
        assert await run.result() == 1


STUBBORN = (
    "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'no\\n'))\nos.write(1, b'up\\n')\n" + WAIT
)


async def test_who_does_not_end_in_time_is_killed() -> None:
    async with running(script("worker", STUBBORN), stop_timeout=0.1) as run:
        await run.until("up")
        run.supervisor.request_stop()
        assert await run.result() == 1
        assert "killing" in run.text


async def test_a_second_signal_kills_at_once() -> None:
    async with running(script("worker", STUBBORN), stop_timeout=3600) as run:
        await run.until("up")
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("no")
        os.kill(os.getpid(), signal.SIGINT)
        assert await run.result() == 1


async def test_a_stop_in_a_pause_starts_nothing_more() -> None:
    async with running(script("worker", "raise SystemExit(1)")) as run:
        run.supervisor.children[0]._backoff.first = 3600.0
        await run.until("restarting in 3600 s")
        run.supervisor.request_stop()
        assert await run.result() == 1
        assert len(run.gone) == 1


async def test_a_command_that_cannot_be_started_is_tried_again() -> None:
    async with running(ChildSpec("worker", lambda n: ["/no/such/program"], lambda n: {})) as run:
        await run.until("worker | cannot start: ", "restarting")
        await until(lambda: run.text.count("cannot start") > 1)


async def test_lines_of_both_streams_come_under_the_childs_name() -> None:
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); import signal; signal.pause()"
    async with running(script("worker", code), lasting("frontend 0")) as run:
        await run.until("worker     | out\n", "worker     | err\n", "frontend 0 | up\n")


async def test_connections_to_a_dead_frontend_wait_for_the_next_one() -> None:
    [listener] = listen("127.0.0.1", 0)
    code = (
        f"import socket\ns = socket.socket(fileno={listener.fileno()}); s.setblocking(True)\n"
        "c, _ = s.accept(); c.recv(1); c.sendall(str(N).encode()); c.close()"
    )
    answers = []
    with listener:
        async with running(script("frontend 0", code, (listener.fileno(),))):
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*reachable(listener))
                writer.write(b"?")
                answers.append(await asyncio.wait_for(reader.read(), PATIENCE_S))
                writer.close()
    assert answers == [b"1", b"2", b"3"]


async def test_it_shows_progress_then_how_to_use_it_then_every_change() -> None:
    answers = [
        (503, '{"progress": 0.42, "reason": "loading"}'),
        (200, "{}"),
        (503, '{"reason": "stalled"}'),
        (500, "what"),
        (200, '{"progress": 1}'),
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    output = io.StringIO()
    supervisor = Supervisor([], Console(output), stop_timeout=1)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        task = asyncio.create_task(report_readiness(supervisor, Console(output), address, "use it so", interval=0.01))
        await until(lambda: "ready again" in output.getvalue(), output.getvalue)
        task.cancel()
    assert output.getvalue().splitlines() == ["loading: 40 %", "use it so", "not ready: stalled", "ready again"]


def test_children_are_told_everything_by_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "1")
    settings = check(with_values(Settings(), {"max_step_tokens": 32, "prefix_cache": False, "port": 9, "model": "a/b"}))
    worker = serve._worker_spec(WorkerPlacement("worker", "worker.heartbeat", settings, {}), tmp_path)
    with socket.socket() as one, socket.socket() as other:
        first, second = serve._frontend_specs(settings, [one, other], tmp_path)
    for role, flags in ((worker, WORKER_FLAGS), (first, FRONTEND_FLAGS)):
        words = role.command(1)[role.command(1).index("deploy.cli.main") + 2 :]
        parser = Parser()
        add_flags(parser, flags)
        ours = [word for word in words if not word.startswith(("--parent=", "--fd=", "--heartbeat="))]
        assert f"--parent={os.getpid()}" in words
        told = read(parser.read(ours), {}, flags)
        assert told.model == settings.model
        assert "SLUICE_PORT" not in role.environment(1)
    assert worker.environment(7)["SLUICE_EPOCH"] == "7"
    assert first.fds != second.fds
    assert f"--fd={second.fds[0]}" in second.command(1)
    assert first.environment(1)["PROMETHEUS_MULTIPROC_DIR"] == second.environment(2)["PROMETHEUS_MULTIPROC_DIR"]


def test_what_is_mapped_has_its_room_from_the_start_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that finds no room when it is written would end the process."""
    assert reserve_metrics(tmp_path / "metrics", "worker")
    files = sorted((tmp_path / "metrics").iterdir())
    assert [file.name for file in files] == ["counter_worker.db", "gauge_max_worker.db", "histogram_worker.db"]
    files[0].write_bytes(b"counted" + files[0].read_bytes()[7:])
    assert reserve_metrics(tmp_path / "metrics", "worker") and files[0].read_bytes()[:7] == b"counted"
    heartbeat = watchdog_for(Settings(), tmp_path, "heartbeat").heartbeat.file
    assert heartbeat is not None
    assert all(file.stat().st_blocks * 512 >= file.stat().st_size > 0 for file in (heartbeat, *files))

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "full").mkdir()
    assert not reserve_metrics(tmp_path / "full", "worker") and not list((tmp_path / "full").iterdir())
    assert not reserve_metrics(tmp_path / "metrics", "worker") and all(file.exists() for file in files)
    with pytest.raises(RunDirError, match="No space left"):
        watchdog_for(Settings(), tmp_path / "full", "heartbeat")
