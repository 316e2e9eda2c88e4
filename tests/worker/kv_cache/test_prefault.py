"""Prefaulting memory before its use: how far ahead, in which order, and that it stops."""

import mmap
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.kv_cache import tensors
from worker.kv_cache.tensors import Prefaulter
from worker.ops.native import touch_pages


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


pytestmark = needs_library


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 2 << 22), dtype=torch.uint8).view(2, 64, 16, 1 << 12)


def test_prefaulter_stays_ahead_of_the_highest_page_and_goes_no_further(
    memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "AHEAD_TOKENS", 16 * 10)
    monkeypatch.setattr(tensors, "STRIDE_TOKENS", 16 * 2)
    prefaulter = Prefaulter(touch_pages, list(memory))
    wait_until(lambda: prefaulter.prefaulted == 10)
    prefaulter.reach(5)
    wait_until(lambda: prefaulter.prefaulted == 16)
    prefaulter.reach(3)
    prefaulter.reach(63)
    wait_until(lambda: prefaulter.prefaulted == 64)
    assert int(memory.sum()) == 0  # pages are touched, but not changed


def test_prefaulter_whose_touch_fails_gives_up(memory: torch.Tensor) -> None:
    addresses: list[int] = []

    def refuse(start: int, nbytes: int) -> bool:
        addresses.append(start)
        return False

    prefaulter = Prefaulter(refuse, list(memory))
    wait_until(lambda: prefaulter.prefaulted == 64)  # it counts the other pages as done
    prefaulter.reach(40)
    assert not prefaulter.touch_next() and len(addresses) == 2  # each address once


def test_touch_pages_changes_no_bytes() -> None:
    memory = torch.randint(0, 255, (3 << 12,), dtype=torch.uint8)
    before = memory.clone()
    assert touch_pages(memory.data_ptr() // 4 * 4, memory.nbytes)
    assert torch.equal(memory, before)


def test_prefaulter_thread_ends_with_it(memory: torch.Tensor) -> None:
    before = set(threading.enumerate())  # engines of other tests may have prefaulters, too
    prefaulters = [Prefaulter(touch_pages, list(memory))]
    (thread,) = [new for new in set(threading.enumerate()) - before if new.name == "prefault"]
    wait_until(lambda: prefaulters[0].prefaulted == 64)
    prefaulters.clear()
    wait_until(lambda: not thread.is_alive())


def test_tensors_are_deleted_by_who_deletes_the_prefaulter_after_the_touch_that_runs() -> None:
    """A thread that deletes tensors while the process exits would abort it."""
    touching, may_end, died_in = threading.Event(), threading.Event(), list[str]()

    def touch(start: int, nbytes: int) -> bool:
        touching.set()
        assert may_end.wait(PATIENCE_S)
        return True

    arrays = [torch.zeros(64, 16, 8)]
    weakref.finalize(arrays[0], lambda: died_in.append(threading.current_thread().name))
    prefaulters = [Prefaulter(touch, arrays)]
    arrays.clear()
    assert touching.wait(PATIENCE_S)
    deleting = threading.Thread(target=prefaulters.clear, name="deleting")
    deleting.start()
    deleting.join(0.05)
    assert deleting.is_alive() and not died_in, "the memory stays while it is touched"
    may_end.set()
    deleting.join(PATIENCE_S)
    assert died_in == ["deleting"]
