"""The supervisor: permanent failures, stopping, replacing children."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from deploy.launcher import supervisor
from deploy.launcher.child import Child, ChildSpec
from deploy.launcher.watchdog import Timeouts, Watchdog
from shared import heartbeat
from shared.heartbeat import Heartbeat
from tests.deploy.launcher.harness import UNTIL_TERM, WAIT, beating, lasting, running, script, until

TIMEOUTS = Timeouts(stall_s=2.0, load_s=10.0)


@pytest.mark.parametrize("code", [2, 3])
async def test_permanent_failure_stops_everything_with_its_code_and_message(code: int) -> None:
    broken = script("worker", f"import sys; print('sluice worker: no weights'); sys.exit({code})")
    async with running(lasting("frontend 0"), broken) as run:
        assert await run.result() == code
        assert "sluice serve: worker cannot start: no weights" in run.text.splitlines()
        assert run.text.count("no weights") == 1, "a mistake is told once"


async def test_error_of_a_child_that_is_restarted_is_shown_with_its_name() -> None:
    broken = script("worker", "import sys\nif N == 1: print('sluice worker: device lost'); sys.exit(1)\n" + WAIT)
    async with running(broken) as run:
        await run.until("worker | sluice worker: device lost", "restarting")


async def test_no_exit_code_is_permanent_after_readiness() -> None:
    async with running(script("worker", UNTIL_TERM.format(code=0) + "if N > 1: signal.pause()\nsys.exit(3)")) as run:
        run.supervisor.ready_once = True
        await until(lambda: run.text.count("up") == 2, lambda: run.text)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_signal_before_readiness_is_passed_on_and_clean_exits_give_its_code(signum: int, code: int) -> None:
    async with running(lasting(), lasting("frontend 0")) as run:
        await until(lambda: run.text.count("up") == 2)
        os.kill(os.getpid(), signum)
        assert await run.result() == code
        assert "restarting" not in run.text


async def test_unclean_exit_gives_one() -> None:
    async with running(lasting(code=7), lasting("frontend 0")) as run:
        await until(lambda: run.text.count("up") == 2)
        run.supervisor.request_stop()
        assert await run.result() == 1


STUBBORN = (
    "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'no\\n'))\nos.write(1, b'up\\n')\n" + WAIT
)


UNTIL_TERM_SLOWLY = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"ending\\n")
    time.sleep(0.3)
    os.write(1, b"ended\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"up\\n")
signal.pause()
"""


async def test_child_that_ignores_sigterm_is_killed_after_the_timeout() -> None:
    async with running(script("worker", STUBBORN), stop_timeout=0.1) as run:
        await run.until("up")
        run.supervisor.request_stop()
        assert await run.result() == 1
        assert "killing" in run.text


async def test_killed_child_that_the_system_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a thread of the child waits for a disk that hangs: SIGKILL has no effect before the disk answers."""
    monkeypatch.setattr(supervisor, "KILLED_S", 0.05)
    async with running(script("worker", STUBBORN), stop_timeout=0.1) as run:
        await run.until("up")
        with monkeypatch.context() as patch:
            patch.setattr(Child, "kill", lambda child: None)
            run.supervisor.request_stop()
            assert await run.result() == 1
        assert "worker is killed, and the system has not ended it yet" in run.text
        run.supervisor.kill()
        await asyncio.wait(run.supervisor._tasks.values())


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
async def test_signal_repeated_within_a_second_leaves_children_to_end_by_themselves(numbers: tuple[int, int]) -> None:
    async with running(script("worker", UNTIL_TERM_SLOWLY), stop_timeout=3600) as run:
        await run.until("up")
        run.supervisor.mark_ready()
        os.kill(os.getpid(), numbers[0])
        await run.until("ending")
        os.kill(os.getpid(), numbers[1])
        assert await run.result() == 0
        assert "ended" in run.text


async def test_second_signal_later_than_a_second_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "REPEAT_S", 0.0)
    async with running(script("worker", STUBBORN), stop_timeout=3600) as run:
        await run.until("up")
        os.kill(os.getpid(), signal.SIGINT)
        await run.until("no")
        os.kill(os.getpid(), signal.SIGINT)
        assert await run.result() == 1


async def test_reload_starts_the_successor_before_the_old_child_drains(tmp_path: Path) -> None:
    successor = beating(tmp_path / "q")
    async with running(beating(tmp_path / "p", leaving=0.5, successor=successor), lasting()) as run:
        await run.until("life 1", "up")
        os.kill(os.getpid(), signal.SIGHUP)
        await run.until("leaving", "frontend 0 was replaced")
        assert run.text.index("leaving") > run.text.rindex("life 1") > run.text.index("life 1")
        assert "restarting" not in run.text and run.supervisor.running == 2
        run.supervisor.request_stop()
        assert await run.result() == 0


async def test_successor_that_does_not_start_leaves_the_old_child(tmp_path: Path) -> None:
    broken = script("frontend 0", "raise SystemExit(2)")
    broken = ChildSpec(broken.name, broken.command, broken.environment, watchdog=Watchdog(Heartbeat(), TIMEOUTS))
    async with running(beating(tmp_path / "p", successor=broken)) as run:
        await run.until("life 1")
        await run.supervisor.reload()
        await run.until("its replacement did not start, so the old one stays")
        assert "leaving" not in run.text and not run.task.done()


async def test_stop_during_a_replacement_ends_all_three_children(tmp_path: Path) -> None:
    successor = beating(tmp_path / "q")
    async with running(beating(tmp_path / "p", leaving=60.0, successor=successor), lasting(), stop_timeout=1.0) as run:
        await run.until("life 1")
        reloading = asyncio.create_task(run.supervisor.reload())
        await run.until("leaving")
        run.supervisor.request_stop()
        await run.result()
        await reloading
        assert len(run.exited) == 3
