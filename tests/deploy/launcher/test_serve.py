"""The launcher: the specs of its children, its readiness report, and a whole server whose children are scripts."""

import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from deploy.launcher import serve
from deploy.launcher.child_command import FRONTEND_FLAGS, WORKER_FLAGS
from deploy.launcher.console import Console
from deploy.launcher.placement import WorkerPlacement
from deploy.launcher.run_dir import listen, reachable
from deploy.launcher.serve import report_readiness
from deploy.launcher.supervisor import Supervisor
from shared.config.check import check
from shared.config.flags import Parser, add_flags, read
from shared.config.settings import Settings, with_values
from tests.deploy.launcher.harness import until
from tests.deploy.launcher.launcher import launcher, until_dead
from tests.patience import PATIENCE_S


async def test_readiness_report_shows_progress_then_usage_then_changes() -> None:
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
        task = asyncio.create_task(
            report_readiness(supervisor, Console(output), address, lambda task: "use it so", interval=0.01)
        )
        await until(lambda: "ready again" in output.getvalue(), output.getvalue)
        task.cancel()
    assert output.getvalue().splitlines() == ["loading: 40 %", "use it so", "not ready: stalled", "ready again"]


def test_children_get_all_settings_as_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "1")
    settings = check(with_values(Settings(), {"max_step_tokens": 32, "prefix_cache": False, "port": 9, "model": "a/b"}))
    worker = serve._worker_spec(WorkerPlacement("worker", "worker.heartbeat", settings, {}), tmp_path)
    with socket.socket() as one, socket.socket() as other:
        first, second = serve._frontend_specs(settings, [one, other], tmp_path)
    for spec, flags in ((worker, WORKER_FLAGS), (first, FRONTEND_FLAGS)):
        words = spec.command(1)[spec.command(1).index("deploy.cli.main") + 2 :]
        parser = Parser()
        add_flags(parser, flags)
        own = [word for word in words if not word.startswith(("--parent=", "--fd=", "--heartbeat="))]
        assert f"--parent={os.getpid()}" in words
        received = read(parser.read(own), {}, flags)
        assert received.model == settings.model
        assert "SLUICE_PORT" not in spec.environment(1)
    assert worker.environment(7)["SLUICE_EPOCH"] == "7"
    assert first.fds != second.fds
    assert f"--fd={second.fds[0]}" in second.command(1)
    assert first.environment(1)["PROMETHEUS_MULTIPROC_DIR"] == second.environment(2)["PROMETHEUS_MULTIPROC_DIR"]


def test_server_starts_restarts_its_worker_and_stops_cleanly(tmp_path: Path) -> None:
    with launcher(tmp_path, "--frontends=2") as run:
        run.until("is ready at http://127.0.0.1")
        pids = run.pids(3)
        [worker] = [int(pid) for pid in re.findall(r"worker +\| pid (\d+)", run.text)]
        os.kill(worker, signal.SIGKILL)
        run.until("worker was killed by SIGKILL; restarting in 0.5 s")
        run.until("epoch 2")
        assert "epoch 1" in run.text
        [folder] = run.temporary.glob("sluice-run-*")
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 0, run.text
        until_dead([*pids, *run.pids(4)])
        assert not folder.exists()


def test_server_signalled_until_it_has_ended_exits_cleanly_without_its_run_folder(tmp_path: Path) -> None:
    with launcher(tmp_path) as started:
        started.until("is ready at http://127.0.0.1")
        deadline = time.monotonic() + PATIENCE_S
        while started.process.poll() is None and time.monotonic() < deadline:
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert started.process.wait(PATIENCE_S) == 0
        assert not list(started.temporary.glob("sluice-run-*"))


def test_server_runs_with_closed_standard_streams(tmp_path: Path) -> None:
    [listener] = listen("127.0.0.1", 0)
    port = reachable(listener)[1]
    listener.close()
    with launcher(tmp_path, f"--port={port}", streams="<&- >&- 2>&-") as run:
        deadline = time.monotonic() + PATIENCE_S
        while run.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                client.settimeout(1)
                if client.recv(15) == b"HTTP/1.1 200 OK":
                    break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE_S) == 0
