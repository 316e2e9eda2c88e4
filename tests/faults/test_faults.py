"""A short run of `python -m tests.faults`: every kind of stream through the worst faults."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults import bad_clients
from tests.faults.catalog import FAULTS
from tests.faults.clients import KINDS, Call, Outcome, mixed_calls
from tests.faults.fault import Fault
from tests.faults.server import ResourceUsage, ServerPlan, ServerUnderTest, running
from tests.faults.trial import Row, one_round, without_faults
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class FaultBench:
    server: ServerUnderTest
    calls: list[Call]
    expected: list[Outcome]
    before: ResourceUsage

    def inject(self, name: str, fault: Fault, step_s: float | None = 0.05) -> Row:
        """step_s: duration of a step before and during the fault, so that streams are in flight on any machine"""
        row, rng = Row(name), random.Random(0)
        asyncio.run(one_round(row, fault, self.server, self.calls, self.expected, self.before, rng, step_s))
        assert row.good, row.notes
        assert row.streams == len(self.calls) == row.identical + row.errors
        return row


def fault_bench(plan: ServerPlan, length: int = 100) -> Iterator[FaultBench]:
    calls = mixed_calls(len(KINDS), length)
    with running(plan) as server:
        yield FaultBench(server, calls, *asyncio.run(without_faults(server, calls)))


@pytest.fixture(scope="module")
def whole() -> Iterator[FaultBench]:
    yield from fault_bench(ServerPlan(held=True))


@pytest.fixture(scope="module")
def split() -> Iterator[FaultBench]:
    yield from fault_bench(ServerPlan(split=True, held=True))


@pytest.fixture(scope="module")
def small() -> Iterator[FaultBench]:
    flags = "--kv-cache-gb", "0.006", "--drain-timeout", str(PATIENCE_S / 2), "--stop-timeout", str(PATIENCE_S * 0.8)
    yield from fault_bench(ServerPlan(flags, frontends=1, held=True))


@pytest.mark.parametrize("name", ["pause-worker", "kill-worker"])
def test_streams_survive_a_stopped_or_killed_worker_with_a_pause(whole: FaultBench, name: str) -> None:
    row = whole.inject(name, FAULTS[name])
    # not all are identical, because requests that were not admitted yet may be refused
    assert max(row.pauses) > 0.5 and row.identical > len(KINDS) // 2


def test_bad_clients_leave_other_streams_identical(whole: FaultBench) -> None:
    row = whole.inject("rude-clients", FAULTS["rude-clients"])
    assert row.identical == row.streams


def test_killed_frontend_cuts_only_its_own_connections(whole: FaultBench) -> None:
    row = whole.inject("kill-frontend", FAULTS["kill-frontend"])
    assert row.errors and row.identical


def test_disconnected_requests_end_long_before_their_answers(whole: FaultBench) -> None:
    whole.inject("disconnects", Fault("300 clients that leave", bad_clients.disconnects(300, 10.0)))


def test_streams_survive_a_faulty_wire_unchanged(split: FaultBench) -> None:
    split.inject("bad-wire", FAULTS["bad-wire"], step_s=0.02)
    assert split.server.proxy is not None and split.server.proxy.altered > 50


def test_preempted_sequences_are_identical_and_drain_lets_all_finish(small: FaultBench) -> None:
    row = small.inject("drain", FAULTS["drain-everyone"], step_s=None)
    assert row.identical == row.streams, row.explicit_errors


def test_row_counts_lost_and_wrong_streams() -> None:
    row = Row("any")
    right = [Outcome("whole", "a")] * 5
    seen = [Outcome("whole", "a"), Outcome("whole", "b"), Outcome("error"), Outcome("cut"), Outcome("lost")]
    row.judge(seen, right, may_cut=False)
    assert (row.identical, row.wrong, row.errors, row.lost, row.good) == (1, 1, 1, 2, False)
    row.judge(seen[3:4], right[:1], may_cut=True)
    assert (row.errors, row.lost) == (2, 2)
