"""Heavy masks are computed outside of the steps if there are other tenants, with the same bytes."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from frontend.structured_output import grammar as build
from shared import messages as m
from tests.patience import PATIENCE_S
from tests.worker.structured_output.harness import NAMED, Bench, alone, submit
from worker.scheduler.host_budget import HostWork
from worker.scheduler.sequence import Sequence
from worker.structured_output.masks_ahead import MasksAhead

KINDS = [NAMED, build.regex("[a-z ]{30}", "x"), build.json_object()]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that computed masks, each of which is taken for a heavy one."""
    from worker.structured_output import masks_ahead

    found, compute = list[str](), masks_ahead.computed

    def noted(*arguments: Any) -> Any:
        found.append(threading.current_thread().name)
        return compute(*arguments)

    monkeypatch.setattr(masks_ahead, "computed", noted)
    monkeypatch.setattr(HostWork, "masked_elsewhere", property(lambda host: host.mask > 0))
    return found


def test_rows_wait_for_heavy_masks_and_answers_are_the_same(
    bench: Bench, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blamed = set[int]()
    record = bench.request_table.crash_journal.record_step

    def noted(sequences: list[Sequence]) -> None:
        blamed.update(one.key[1] for one in bench.scheduler.masked if one in sequences)
        record(sequences)

    monkeypatch.setattr(bench.request_table.crash_journal, "record_step", noted)

    def asked(first: int) -> list[m.Submit]:
        options = {"temperature": 0.9, "tenant": "a"}
        return [submit(first + at, made, 40, seed=at, **options) for at, made in enumerate(KINDS)]

    wanted = [*alone(bench, *asked(1))[0].values()]
    assert not threads, "alone, a tenant's masks are computed in the steps"
    bench.send(*asked(11))
    rng, other, deadline = random.Random(0), 100, time.monotonic() + PATIENCE_S
    while not {11, 12, 13} <= bench.received()[1].keys():
        assert time.monotonic() < deadline
        running = [*bench.scheduler.state.running]
        if rng.random() < 0.03 and len(running) > 1:
            bench.scheduler.state.preempt(rng.choice(running), bench.now)
        if all(one.turn.tenant == "a" for one in bench.scheduler.sequences()):
            bench.send(submit(other := other + 1, "", 60, tenant="b", ignore_eos=True))
        bench.iterate()
    bench.finish()
    outputs = bench.received()[0]
    assert [outputs[id] for id in (11, 12, 13)] == wanted
    assert blamed >= {11, 12}, "a mask that kills the worker is blamed"
    assert len(threads) > 40 and {name.partition("_")[0] for name in threads} == {"masks"}


class State:
    """Its mask takes until `go_on` is set."""

    def __init__(self, begun: list[str], name: str, go_on: threading.Event) -> None:
        self.begun, self.name, self.go_on = begun, name, go_on

    def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None:
        self.begun.append(self.name)
        assert self.go_on.wait(PATIENCE_S)


class Owner:
    """Holds a mask, as a sequence's matcher does."""


def test_tenants_take_turns_and_work_ends_with_its_owner() -> None:
    begun, go_on, woken = list[str](), threading.Event(), list[int]()
    ahead = MasksAhead(64, lambda: woken.append(1))
    owners = [Owner() for _ in range(4)]
    masks = [ahead.begin(State(begun, f"a{at}", go_on), owners[at], "a") for at in range(4)]
    until(lambda: begun == ["a0"])
    other = Owner()
    masks.append(ahead.begin(State(begun, "b", go_on), other, "b"))
    owners[1] = Owner()  # the sequence has ended
    assert masks[2].cancel() and not masks[0].cancel()
    go_on.set()
    bits, seconds = masks[4].result(PATIENCE_S)
    assert bits.tolist() == [0] * 8 and seconds >= 0.0
    masks[3].result(PATIENCE_S)
    until(lambda: len(woken) == 5)
    assert begun == ["a0", "b", "a3"]
    ahead.close()
    late = ahead.begin(State(begun, "late", go_on), other, "b")
    assert late.cancelled(), "its mask is computed in a step"


def test_mask_that_fails_is_told_to_the_step() -> None:
    class Broken(State):
        def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None:
            raise ZeroDivisionError

    owner, ahead = Owner(), MasksAhead(64, lambda: None)
    mask = ahead.begin(Broken([], "", threading.Event()), owner, "")
    with pytest.raises(ZeroDivisionError):
        mask.result(PATIENCE_S)
    ahead.close()
