"""Calls in a child process: their results, and the errors of calls that crash, hang or take all memory."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import sandbox as expendable
from shared.sandbox import Killed, Lost, NotStarted, Raised, Sandbox, SlowTenants, TookTooLong
from tests.patience import PATIENCE_S

AUTOGROUP = Path("/proc/self/autogroup")  # Linux schedules the processes of a session together

CHILD_CODE = """
import os, signal, time
def act(what, value=None):
    if what == "echo": return value
    if what == "pid": return os.getpid()
    if what == "environment": return sorted(os.environ)
    if what == "raise": raise ValueError(value)
    if what == "sleep": time.sleep(value)
    if what == "kill": signal.raise_signal(value)
    if what == "take": return len(bytearray(value))
    if what == "print": print(value, flush=True)
    if what == "keep": keep.append(bytearray(value))
    if what == "deep": return deep(value)
def deep(n): return [deep(n - 1)] if n else []
keep = []
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("child")
    (folder / "acting_child.py").write_text(CHILD_CODE)
    sys.path.append(str(folder))
    made = Sandbox("acting_child:act", megabytes=64)
    yield made
    made.close()
    sys.path.remove(str(folder))


def ask(child: Sandbox, *arguments: object) -> object:
    return child.call(*arguments, seconds=PATIENCE_S)


def test_call_returns_the_result_and_keeps_the_child(child: Sandbox) -> None:
    assert ask(child, "echo", ["a" * 300_000, b"\x00", {"n": 1}]) == ["a" * 300_000, b"\x00", {"n": 1}]
    assert ask(child, "pid") == ask(child, "pid") == child.pid != os.getpid()


def test_call_survives_a_signal_to_stop_that_everyone_gets(child: Sandbox) -> None:
    assert ask(child, "kill", signal.SIGTERM) is None and ask(child, "echo", 1) == 1


def test_call_of_a_function_that_prints_returns(child: Sandbox) -> None:
    assert ask(child, "print", "x" * 100_000) is None and ask(child, "echo", 1) == 1


def test_call_hides_the_parents_environment(child: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    child.close()
    assert "HF_TOKEN" not in str(ask(child, "environment"))


def test_call_that_raises_raises_its_text_and_keeps_the_child(child: Sandbox) -> None:
    before = ask(child, "pid")
    with pytest.raises(Raised, match="ValueError: no"):
        ask(child, "raise", "no")
    assert ask(child, "pid") == before


@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGSEGV, "deeply"), (signal.SIGABRT, "64 MB"), (signal.SIGKILL, r"ended \(-9\)")],
)
def test_call_that_ends_its_child_is_lost_and_the_next_works(child: Sandbox, number: int, why: str) -> None:
    with pytest.raises(Lost, match=why):
        ask(child, "kill", number)
    assert ask(child, "echo", 1) == 1


def test_child_killed_between_calls_is_replaced(child: Sandbox) -> None:
    pid = ask(child, "pid")
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    while child._child is not None and not child._child.has_left():
        time.sleep(0.001)
    assert ask(child, "pid") != pid


def test_child_killed_during_a_call_costs_that_call(child: Sandbox) -> None:
    ask(child, "echo", 1)
    threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(Killed, match="ended"):
        ask(child, "sleep", PATIENCE_S)
    assert ask(child, "echo", 1) == 1


def test_call_that_takes_too_long_is_killed(child: Sandbox) -> None:
    pid = ask(child, "pid")
    with pytest.raises(TookTooLong, match=r"longer than 0\.2 s"):
        child.call("sleep", PATIENCE_S, seconds=0.2)
    assert not Path(f"/proc/{pid}").exists() and ask(child, "echo", 1) == 1


def test_call_that_takes_too_much_memory_is_lost(child: Sandbox) -> None:
    assert ask(child, "take", 16 << 20) == 16 << 20
    with pytest.raises(Lost, match="64 MB"):
        ask(child, "take", 80 << 20)


def test_child_that_keeps_memory_is_replaced_after_its_answer(child: Sandbox) -> None:
    before = ask(child, "pid")
    assert ask(child, "keep", 40 << 20) is None
    assert ask(child, "pid") != before


def test_child_whose_parent_has_gone_ends(child: Sandbox) -> None:
    made = Sandbox("acting_child:act", megabytes=64)
    pid = ask(made, "pid")
    del made
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_call_without_a_process_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(NotStarted, match="no child process"):
        ask(Sandbox("os:getpid", megabytes=64))


def test_call_without_such_a_module_raises() -> None:
    with pytest.raises(NotStarted):
        ask(Sandbox("no_such_module:f", megabytes=64))


def test_long_call_goes_on_with_a_lower_priority_and_the_next_call_has_another_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short calls, which are all that honest clients send, keep the priority of the parent."""
    monkeypatch.setattr(expendable, "YIELD_S", 0.05)
    child = Sandbox("tests.shared.test_expendable:priority_after", megabytes=64)
    group = Sandbox("tests.shared.test_expendable:group_priority_after", megabytes=64)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        assert child.call(0.0, seconds=PATIENCE_S) == own
        first = child.pid
        assert child.call(0.0, seconds=PATIENCE_S) == own and child.pid == first
        assert child.call(1.0, seconds=PATIENCE_S) == min(19, own + expendable.NICENESS)
        assert group.call(1.0, seconds=PATIENCE_S) == expendable.NICENESS or not AUTOGROUP.exists()
        assert child.call(0.0, seconds=PATIENCE_S) == own and child.pid not in (0, first)
    finally:
        child.close()
        group.close()


def test_child_for_slow_tenants_keeps_its_lower_priority_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expendable, "YIELD_S", 0.05)
    child = Sandbox("tests.shared.test_expendable:priority_after", megabytes=64, slow=True)
    group = Sandbox("tests.shared.test_expendable:group_priority_after", megabytes=64, slow=True)
    lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + expendable.SLOW_NICENESS)
    try:
        assert child.call(0.0, seconds=PATIENCE_S) == lower
        first = child.pid
        assert child.call(0.2, seconds=PATIENCE_S) == lower and child.pid == first
        assert group.call(0.0, seconds=PATIENCE_S) == expendable.SLOW_NICENESS or not AUTOGROUP.exists()
    finally:
        child.close()
        group.close()


def test_tenant_is_slow_for_a_while_after_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    slow = SlowTenants()
    slow.note("a", expendable.YIELD_S / 2)
    slow.note("b", 2 * expendable.YIELD_S)
    assert "a" not in slow and "b" in slow and "c" not in slow
    now += expendable.SLOW_S / 2
    slow.note("b", 0.0)
    slow.note("a", 1.0)
    now += expendable.SLOW_S / 2
    assert "b" not in slow and "a" in slow


def group_priority_after(seconds: float) -> int:
    """Runs in the child."""
    time.sleep(seconds)
    return int(AUTOGROUP.read_text().split()[-1]) if AUTOGROUP.exists() else 0


def priority_after(seconds: float) -> int:
    """Runs in the child."""
    time.sleep(seconds)
    return os.getpriority(os.PRIO_PROCESS, 0)
