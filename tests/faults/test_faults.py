"""The quick part of `python -m tests.faults`: every kind of stream through the worst of its faults."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults import rude
from tests.faults.fault import Fault
from tests.faults.faults import FAULTS
from tests.faults.load import KINDS, Call, Seen, mixture
from tests.faults.site import Footprint, Plan, Site, running
from tests.faults.trial import Row, one_round, undisturbed
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Bench:
    site: Site
    calls: list[Call]
    expected: list[Seen]
    before: Footprint

    def strike(self, name: str, fault: Fault, step_s: float | None = 0.05) -> Row:
        """A step lasts so long before the fault and during it, so that streams are under way on any machine."""
        row, dice = Row(name), random.Random(0)
        asyncio.run(one_round(row, fault, self.site, self.calls, self.expected, self.before, dice, step_s))
        assert row.good, row.notes
        assert row.streams == len(self.calls) == row.identical + row.errors
        return row


def benches(plan: Plan, length: int = 100) -> Iterator[Bench]:
    calls = mixture(len(KINDS), length)
    with running(plan) as site:
        yield Bench(site, calls, *asyncio.run(undisturbed(site, calls)))


@pytest.fixture(scope="module")
def whole() -> Iterator[Bench]:
    yield from benches(Plan(held=True))


@pytest.fixture(scope="module")
def split() -> Iterator[Bench]:
    yield from benches(Plan(split=True, held=True))


@pytest.fixture(scope="module")
def small() -> Iterator[Bench]:
    flags = "--kv-cache-gb", "0.006", "--drain-timeout", str(PATIENCE_S / 2), "--stop-timeout", str(PATIENCE_S * 0.8)
    yield from benches(Plan(flags, frontends=1, held=True))


@pytest.mark.parametrize("name", ["pause-worker", "kill-worker"])
def test_nobody_notices_but_for_a_pause(whole: Bench, name: str) -> None:
    row = whole.strike(name, FAULTS[name])
    assert max(row.pauses) > 0.5 and row.identical > len(KINDS) // 2  # what was not yet admitted may be refused


def test_rude_clients_harm_only_themselves(whole: Bench) -> None:
    row = whole.strike("rude-clients", FAULTS["rude-clients"])
    assert row.identical == row.streams


def test_a_killed_frontend_takes_only_its_own_connections_along(whole: Bench) -> None:
    row = whole.strike("kill-frontend", FAULTS["kill-frontend"])
    assert row.errors and row.identical


def test_what_clients_leave_behind_ends_long_before_its_answer_would(whole: Bench) -> None:
    whole.strike("disconnects", Fault("300 clients that leave", rude.disconnects(300, 10.0)))


def test_a_bad_wire_harms_nothing(split: Bench) -> None:
    split.strike("bad-wire", FAULTS["bad-wire"], step_s=0.02)
    assert split.site.proxy is not None and split.site.proxy.touched > 50


def test_sequences_that_give_way_go_on_unchanged_and_a_drain_lets_all_finish(small: Bench) -> None:
    row = small.strike("drain", FAULTS["drain-everyone"], step_s=None)
    assert row.identical == row.streams, row.said


def test_a_judge_sees_what_is_lost_and_what_is_wrong() -> None:
    row = Row("any")
    right = [Seen("whole", "a")] * 5
    seen = [Seen("whole", "a"), Seen("whole", "b"), Seen("error"), Seen("cut"), Seen("lost")]
    row.judge(seen, right, cuts=False)
    assert (row.identical, row.wrong, row.errors, row.lost, row.good) == (1, 1, 1, 2, False)
    row.judge(seen[3:4], right[:1], cuts=True)
    assert (row.errors, row.lost) == (2, 2)
