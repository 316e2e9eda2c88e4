"""When a process counts as hanging, and when as killed by its own work."""

import signal

import pytest

from deploy.launcher.watchdog import CHECK_INTERVAL_S, Timeouts, Watchdog
from shared.heartbeat import Heartbeat, Phase

TIMEOUTS = Timeouts(stall_s=2.0, load_s=10.0)


class Checked:
    """A watchdog that is checked every CHECK_INTERVAL_S. `seconds(n)` returns its verdict after n seconds."""

    def __init__(self, phase: Phase = Phase.SERVING) -> None:
        self.oom = 0
        self.output_bytes = 0
        self.watchdog = Watchdog(Heartbeat(), TIMEOUTS, lambda: self.oom)
        self.watchdog.heartbeat.phase = phase

    def seconds(self, count: float, *, alive: bool = False, progress: bool = False, output: bool = False) -> str:
        for _ in range(int(count / CHECK_INTERVAL_S)):
            self.watchdog.heartbeat.alive() if alive else None
            self.watchdog.heartbeat.progress() if progress else None
            self.output_bytes += output
            if reason := self.watchdog.check(CHECK_INTERVAL_S, self.output_bytes):
                return reason
        return ""


def test_serving_process_must_be_alive_and_progress() -> None:
    assert Checked().seconds(60, alive=True, progress=True) == ""
    assert "no sign of life for 2 s" in Checked().seconds(4)
    assert "no progress for 2 s" in Checked().seconds(4, alive=True)
    checked = Checked()
    assert [checked.seconds(1.5, alive=True), checked.seconds(0.5, progress=True, alive=True)] * 2 == [""] * 4


def test_loading_process_must_progress_or_print() -> None:
    checked = Checked(Phase.LOADING)
    assert checked.seconds(60, progress=True) == checked.seconds(60, output=True) == checked.seconds(9) == ""
    assert "no loading progress for 1" in checked.seconds(9, alive=True)


def test_long_pause_of_the_supervisor_is_no_hang() -> None:
    checked = Checked()
    checked.seconds(0.5)
    assert checked.watchdog.check(3600.0, 0) == ""


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
def test_exit_of_own_work_is_blamed(code: int, hung: bool, oom: int, blamed: bool) -> None:
    checked = Checked()
    checked.oom += oom
    checked.watchdog.ended(code, hung=hung)
    assert checked.watchdog.heartbeat.blamed is blamed


def test_process_that_never_served_keeps_the_earlier_blame() -> None:
    checked = Checked()
    checked.watchdog.ended(-signal.SIGSEGV, hung=False)
    checked.watchdog.start()
    checked.watchdog.ended(-signal.SIGKILL, hung=False)
    assert checked.watchdog.heartbeat.blamed
