"""When a process hangs, and when it died of its own work; and what the supervisor does about it."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.supervisor.child_process import ChildSpec, watch_children
from deploy.supervisor.watchdog import CHECK_INTERVAL_S, Timeouts, Watchdog, is_stopped
from shared.heartbeat import Heartbeat, Phase
from tests.deploy.test_launch import lasting, running, script, until

PATIENCE = Timeouts(stall_s=2.0, load_s=10.0)


class Looked:
    """A watch that is looked at every CHECK_INTERVAL_S; `seconds(n)` returns what it says after them."""

    def __init__(self, phase: Phase = Phase.SERVING) -> None:
        self.oom = 0
        self.heard = 0
        self.watch = Watchdog(Heartbeat(), PATIENCE, lambda: self.oom)
        self.watch.heartbeat.phase = phase

    def seconds(self, count: float, *, beats: bool = False, turns: bool = False, heard: bool = False) -> str:
        for _ in range(int(count / CHECK_INTERVAL_S)):
            self.watch.heartbeat.alive() if beats else None
            self.watch.heartbeat.progress() if turns else None
            self.heard += heard
            if said := self.watch.check(CHECK_INTERVAL_S, self.heard):
                return said
        return ""


def test_who_serves_must_talk_and_move() -> None:
    assert Looked().seconds(60, beats=True, turns=True) == ""
    assert "no sign of life for 2 s" in Looked().seconds(4)
    assert "no progress for 2 s" in Looked().seconds(4, beats=True)
    looked = Looked()
    assert [looked.seconds(1.5, beats=True), looked.seconds(0.5, turns=True, beats=True)] * 2 == [""] * 4


def test_who_loads_must_move_or_say_something() -> None:
    looked = Looked(Phase.LOADING)
    assert looked.seconds(60, turns=True) == looked.seconds(60, heard=True) == looked.seconds(9) == ""
    assert "no loading progress for 1" in looked.seconds(9, beats=True)


def test_a_supervisor_that_was_away_blames_nobody() -> None:
    looked = Looked()
    looked.seconds(0.5)
    assert looked.watch.check(3600.0, 0) == ""


@pytest.mark.parametrize(
    ("code", "hung", "oom", "blamed"),
    [
        (-signal.SIGSEGV, False, 0, True),
        (1, False, 0, True),
        (-signal.SIGKILL, False, 0, False),
        (-signal.SIGKILL, True, 0, True),
        (-signal.SIGKILL, False, 1, True),
        (0, False, 0, False),
        (-signal.SIGTERM, False, 1, False),
    ],
)
def test_a_death_of_its_own_work(code: int, hung: bool, oom: int, blamed: bool) -> None:
    looked = Looked()
    looked.oom += oom
    looked.watch.ended(code, hung=hung)
    assert looked.watch.heartbeat.blamed is blamed


def test_who_never_served_says_nothing_of_those_before_it() -> None:
    looked = Looked()
    looked.watch.ended(-signal.SIGSEGV, hung=False)
    looked.watch.start()
    looked.watch.ended(-signal.SIGKILL, hung=False)
    assert looked.watch.heartbeat.blamed


def test_a_pulse_is_read_by_others_and_private(tmp_path: Path) -> None:
    one, other = Heartbeat(tmp_path / "heartbeat"), Heartbeat(tmp_path / "heartbeat")
    one.alive()
    one.progress()
    one.phase = Phase.LOADING
    one.body[:2] = b"hi"
    assert (other.alive_count, other.progress_count, other.phase, bytes(other.body[:2])) == (1, 1, Phase.LOADING, b"hi")
    assert (tmp_path / "heartbeat").stat().st_mode & 0o077 == 0


def test_a_pulse_that_was_taken_away_is_there_again_for_the_next_process(tmp_path: Path) -> None:
    file = tmp_path / "run" / "heartbeat"
    file.parent.mkdir()
    ours = Heartbeat(file)
    ours.body[:2] = b"hi"
    ours.blamed = True
    shutil.rmtree(file.parent)
    ours.start()
    next_one = Heartbeat(file)
    assert next_one.blamed and bytes(next_one.body[:2]) == b"hi"
    next_one.phase = Phase.SERVING
    assert ours.phase is Phase.SERVING and file.parent.stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    ours.file = tmp_path / "file" / "heartbeat"  # which cannot be
    ours.start()


LIVES = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from shared.heartbeat import Phase, Heartbeat
heartbeat = Heartbeat(Path({file!r}))
heartbeat.phase = Phase.SERVING
print("life", N, flush=True)
import signal, os
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGHUP, lambda *_: (print("leaving", flush=True), time.sleep({leaving}), os._exit(0)))
while True:
    heartbeat.alive()
    if N > 1 or {good}:
        heartbeat.progress()
    time.sleep(0.02)
"""


def beating(file: Path, *, good: bool = True, leaving: float = 0.0, successor: ChildSpec | None = None) -> ChildSpec:
    """Turns from its second life on, or from the first if it is `good`."""
    code = LIVES.format(root=str(Path(__file__).parents[2]), file=str(file), good=good, leaving=leaving)
    plain = script("frontend 0", code)
    watch = Watchdog(Heartbeat(file), Timeouts(0.6, 60.0))
    return ChildSpec(plain.name, plain.command, plain.environment, watchdog=watch, successor=lambda: successor or plain)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("deploy.supervisor.child_process.CHECK_INTERVAL_S", 0.1)
    yield


async def test_who_hangs_is_killed_once_and_started_again(tmp_path: Path, quick: None) -> None:
    async with running(beating(tmp_path / "p", good=False), lasting()) as run:
        await run.until("life 1", "hangs: no progress for", "was killed by SIGKILL", "life 2")
        await asyncio.sleep(1.0)
        assert run.text.count("hangs") == run.text.count("was killed") == 1
        assert run.text.count("up") == 1, "whoever has no heartbeat is left alone"


async def test_who_was_stopped_did_not_hang_of_its_work(tmp_path: Path, quick: None) -> None:
    role = beating(tmp_path / "p")
    async with running(role) as run:
        await run.until("life 1")
        child = run.supervisor.children[0]
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: is_stopped(pid))
        await run.until("(it is stopped); killing it", "life 2")
        assert role.watchdog is not None and not role.watchdog.heartbeat.blamed


async def test_the_next_one_serves_before_the_last_one_leaves(tmp_path: Path) -> None:
    successor = beating(tmp_path / "q")
    async with running(beating(tmp_path / "p", leaving=0.5, successor=successor), lasting()) as run:
        await run.until("life 1", "up")
        os.kill(os.getpid(), signal.SIGHUP)
        await run.until("leaving", "frontend 0 was replaced")
        assert run.text.index("leaving") > run.text.rindex("life 1") > run.text.index("life 1")
        assert "restarting" not in run.text and run.supervisor.running == 2
        run.supervisor.request_stop()
        assert await run.result() == 0


async def test_a_successor_that_does_not_come_up_changes_nothing(tmp_path: Path) -> None:
    broken = script("frontend 0", "raise SystemExit(2)")
    broken = ChildSpec(broken.name, broken.command, broken.environment, watchdog=Watchdog(Heartbeat(), PATIENCE))
    async with running(beating(tmp_path / "p", successor=broken)) as run:
        await run.until("life 1")
        await run.supervisor.reload()
        await run.until("its replacement did not start, so the old one stays")
        assert "leaving" not in run.text and not run.task.done()


async def test_a_stop_in_the_middle_of_a_replacement_ends_all_three(tmp_path: Path) -> None:
    successor = beating(tmp_path / "q")
    async with running(beating(tmp_path / "p", leaving=60.0, successor=successor), lasting(), stop_timeout=1.0) as run:
        await run.until("life 1")
        reloading = asyncio.create_task(run.supervisor.reload())
        await run.until("leaving")
        run.supervisor.request_stop()
        await run.result()
        await reloading
        assert len(run.gone) == 3


async def test_looking_goes_on_for_those_who_come_later(quick: None) -> None:
    seen: list[float] = []

    class Seen:
        def check(self, elapsed: float) -> None:
            seen.append(elapsed)

    children: dict[Seen, None] = {}
    task = asyncio.create_task(watch_children(children))  # type: ignore[arg-type]
    children[Seen()] = None
    await until(lambda: len(seen) > 1)
    task.cancel()
    assert min(seen) > 0
