"""Child processes: restarts, backoff, output, and hangs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.launcher.child import Backoff, ChildSpec, watch_children
from deploy.launcher.watchdog import is_stopped
from tests.deploy.launcher.harness import beating, lasting, running, script, until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("deploy.launcher.child.CHECK_INTERVAL_S", 0.1)
    yield


async def test_exited_child_is_restarted_with_the_next_incarnation() -> None:
    flaky = script(
        "worker", "print('life', N, flush=True)\nif N < 3: raise SystemExit(1)\nimport signal; signal.pause()"
    )
    async with running(flaky, lasting("frontend 0")) as run:
        await run.until("life 1", "life 2", "life 3")
        assert run.text.count("worker ended with exit code 1; restarting in") == 2
        assert run.text.count("up") == 1, "the frontend was left alone"
        assert len(set(run.exited)) == 2


async def test_child_killed_by_a_signal_is_restarted_and_the_log_names_the_signal() -> None:
    async with running(lasting()) as run:
        await run.until("up")
        run.supervisor.children[0].kill()
        await run.until("worker was killed by SIGKILL")
        await until(lambda: run.text.count("up") == 2)


def test_backoff_doubles_up_to_a_limit_and_resets_after_a_healthy_life() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff.after(60), backoff.after(59)] == [0.5, 1]


async def test_child_that_was_ready_is_restarted_at_once() -> None:
    dying = script("worker", "import time; print('life', N, flush=True); time.sleep(0.3); raise SystemExit(1)")
    async with running(dying) as run:
        child = run.supervisor.children[0]
        child._backoff = Backoff(first=0.01, longest=3600.0, _next=3600.0)
        for n in range(1, 4):  # without mark_ready, the pause before the second process would be an hour
            await run.until(f"life {n}")
            run.supervisor.mark_ready()
        run.supervisor.request_stop()


async def test_stop_during_backoff_starts_no_process() -> None:
    async with running(script("worker", "raise SystemExit(1)")) as run:
        run.supervisor.children[0]._backoff.first = 3600.0
        await run.until("restarting in 3600 s")
        run.supervisor.request_stop()
        assert await run.result() == 1
        assert len(run.exited) == 1


async def test_stop_before_the_restart_of_a_child_that_had_served_is_clean() -> None:
    async with running(lasting()) as run:
        await run.until("up")
        run.supervisor.mark_ready()
        child = run.supervisor.children[0]
        child._backoff.first = 3600.0
        child.kill()
        await run.until("restarting in 3600 s")
        run.supervisor.request_stop()
        assert await run.result() == 0


async def test_command_that_cannot_start_is_retried() -> None:
    async with running(ChildSpec("worker", lambda n: ["/no/such/program"], lambda n: {})) as run:
        await run.until("worker | cannot start: ", "restarting")
        await until(lambda: run.text.count("cannot start") > 1)


async def test_output_of_both_streams_is_labelled_with_the_child_name() -> None:
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); import signal; signal.pause()"
    async with running(script("worker", code), lasting("frontend 0")) as run:
        await run.until("worker     | out\n", "worker     | err\n", "frontend 0 | up\n")


async def test_hanging_child_is_killed_once_and_restarted(tmp_path: Path, quick: None) -> None:
    async with running(beating(tmp_path / "p", good=False), lasting()) as run:
        await run.until("life 1", "hangs: no progress for", "was killed by SIGKILL", "life 2")
        await asyncio.sleep(1.0)
        assert run.text.count("hangs") == run.text.count("was killed") == 1
        assert run.text.count("up") == 1, "a child without a heartbeat is left alone"


async def test_stopped_child_is_killed_but_not_blamed(tmp_path: Path, quick: None) -> None:
    spec = beating(tmp_path / "p")
    async with running(spec) as run:
        await run.until("life 1")
        child = run.supervisor.children[0]
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: is_stopped(pid))
        await run.until("(it is stopped); killing it", "life 2")
        assert spec.watchdog is not None and not spec.watchdog.heartbeat.blamed


async def test_watch_children_checks_children_added_later(quick: None) -> None:
    seen: list[float] = []

    class FakeChild:
        def check(self, elapsed: float) -> None:
            seen.append(elapsed)

    children: dict[FakeChild, None] = {}
    task = asyncio.create_task(watch_children(children))  # type: ignore[arg-type]
    children[FakeChild()] = None
    await until(lambda: len(seen) > 1)
    task.cancel()
    assert min(seen) > 0
