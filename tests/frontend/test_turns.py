"""Long work runs in threads of its own kind, in which tenants take turns, and ends with the task that awaits it."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any

import psutil
import pytest

from frontend import turns
from frontend.errors import Overloaded
from frontend.turns import FairChildren, FairThreads
from shared import sandbox
from shared.sandbox import Lost
from tests.patience import PATIENCE_S

SLEEP = "time:sleep"
PRIORITY = "tests.shared.test_expendable:priority_after"


async def of(tenant: str, work: Awaitable[Any]) -> Any:
    turns.tenant.set(tenant)
    return await work


def started(tenant: str, work: Awaitable[Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(of(tenant, work))


async def test_one_tenants_work_leaves_a_place_for_others() -> None:
    threads, go_on = FairThreads("test", 3, each=2), threading.Event()
    slow = [started("a", threads.run(go_on.wait, PATIENCE_S)) for _ in range(10)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.sleep(0.01)
        assert [await of("b", threads.run(int, "7")) for _ in range(3)] == [7, 7, 7]
        go_on.set()
        assert await asyncio.gather(*slow) == [True] * 10


async def test_tenants_with_waiting_work_take_turns() -> None:
    threads, order, go_on = FairThreads("test", 1), list[str](), threading.Event()
    first = started("a", threads.run(go_on.wait, PATIENCE_S))
    await asyncio.sleep(0.01)
    waiting = [started(name[0], threads.run(order.append, name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(first, *waiting)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_waiting_work_of_a_client_that_left_is_dropped() -> None:
    threads, order, go_on = FairThreads("test", 1), list[str](), threading.Event()
    first = started("a", threads.run(go_on.wait, PATIENCE_S))
    await asyncio.sleep(0.01)
    left, stays = started("a", threads.run(order.append, "left")), started("a", threads.run(order.append, "stays"))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(first, stays)
    assert order == ["stays"] and left.cancelled()
    assert await threads.run(int, "1") == 1


async def test_too_many_waiting_pieces_of_one_tenant_are_refused_and_those_of_others_are_not() -> None:
    threads, go_on = FairThreads("test", 2, most_waiting=1, doing="things wait"), threading.Event()
    slow = [started("a", threads.run(go_on.wait, PATIENCE_S)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="1 things wait"):
        await of("a", threads.run(int, "1"))
    assert await of("b", threads.run(int, "1")) == 1
    go_on.set()
    await asyncio.gather(*slow)


async def test_error_in_a_thread_reaches_its_task_and_frees_the_place() -> None:
    threads = FairThreads("test", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.run(int, "x")
    assert await threads.run(int, "1") == 1


async def test_child_of_a_client_that_left_is_ended_and_the_next_call_is_not() -> None:
    children = FairChildren("test", SLEEP, 1, megabytes=64, most_waiting=9, doing="")
    assert await children.call(0.0, seconds=PATIENCE_S) is None
    (child, _), begun = children.idle(), time.monotonic()
    process = psutil.Process(child.pid)
    left = started("a", children.call(PATIENCE_S, seconds=2 * PATIENCE_S))
    await asyncio.sleep(0.05)
    left.cancel()
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await of("b", children.call(0.0, seconds=PATIENCE_S)) is None
    assert left.cancelled() and not process.is_running() and time.monotonic() - begun < PATIENCE_S / 2


async def test_child_that_takes_too_long_costs_its_own_tenant_only() -> None:
    children = FairChildren("test", SLEEP, 2, megabytes=64, most_waiting=9, doing="")
    slow = started("a", children.call(PATIENCE_S, seconds=0.3))
    assert await of("b", children.call(0.0, seconds=PATIENCE_S)) is None
    with pytest.raises(Lost, match="longer than"):
        await slow
    assert all(child.pid for child in children.idle()[:2]), "the next call need not wait for a child to start"


async def test_slow_tenant_gets_children_with_a_lower_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.sandbox.SLOW_S", PATIENCE_S)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    children = FairChildren("test", PRIORITY, 2, megabytes=64, most_waiting=9, doing="")
    await of("a", children.call(2 * sandbox.YIELD_S, seconds=PATIENCE_S))
    monkeypatch.setattr("shared.sandbox.YIELD_S", PATIENCE_S)  # no further call takes long
    assert await of("a", children.call(0.0, seconds=PATIENCE_S)) == min(19, own + sandbox.SLOW_NICENESS)
    assert await of("b", children.call(0.0, seconds=PATIENCE_S)) == own
