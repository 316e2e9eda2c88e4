"""Tests of frontend/workers/status.py."""

import msgspec
import pytest

from frontend.workers.status import (
    DRAINING,
    READY,
    ConnectionState,
    Readiness,
    WorkerStatus,
    aggregate,
    not_ready,
    readiness_of,
)
from shared.messages import ConnectedFrontend, KVUsage, Pages, Quantiles, Status, WorkerState

USAGE = (KVUsage("full", 1, 5, 100), KVUsage("window", 2, 2, 50))
STATUS = Status(1, 1, "m", "cpu", "float32", WorkerState.READY)


def reported(state: WorkerState, progress: float = 0.0) -> Status:
    return msgspec.structs.replace(STATUS, state=state, progress=progress, error="out of memory")


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        (ConnectionState.READY, STATUS, READY),
        (ConnectionState.DRAINING, STATUS, DRAINING),
        (ConnectionState.CONNECTING, None, not_ready("no worker yet")),
        (ConnectionState.HANDSHAKE, STATUS, not_ready("greeting the worker")),
        (ConnectionState.LOST, STATUS, not_ready("worker lost")),
        (ConnectionState.LEAVING, STATUS, not_ready("leaving")),
        (ConnectionState.INCOMPATIBLE, STATUS, not_ready("another model")),
        (ConnectionState.STALLED, STATUS, not_ready("stalled: the last step was 31 s ago")),
        (ConnectionState.FAILED, reported(WorkerState.FAILED), not_ready("the worker failed: out of memory")),
        (ConnectionState.LOADING, reported(WorkerState.DOWNLOADING, 0.15), not_ready("downloading 15%")),
        (ConnectionState.LOADING, reported(WorkerState.LOADING, 0.42), not_ready("loading 42%")),
        (ConnectionState.LOADING, reported(WorkerState.LOADING, 1.0), not_ready("loaded, preparing to compute")),
    ],
)
def test_readiness_says_why_a_worker_is_not_ready(
    state: ConnectionState, status: Status | None, expected: Readiness
) -> None:
    assert readiness_of(state, status, "another model", 31.2) == expected


def worker(name: str, connected: bool = True, **values: object) -> WorkerStatus:
    state = ConnectionState.READY if connected else ConnectionState.LOST
    return WorkerStatus(name, state, "", msgspec.structs.replace(STATUS, **values), connected=connected)


def test_aggregate_of_no_worker_is_none_and_of_one_its_status() -> None:
    assert aggregate([]) is aggregate([WorkerStatus("a", ConnectionState.CONNECTING, "")]) is None
    assert aggregate([worker("a", running=3)]) == msgspec.structs.replace(STATUS, running=3)


def test_aggregate_adds_counts_and_takes_the_slowest_latency() -> None:
    a = worker(
        "a",
        running=1,
        pages=Pages(1, 2, 3, 6),
        kv_cache=(KVUsage("full", 3, 6, 300),),
        ttft=Quantiles(1, 2, 9),
        last_step_age_s=0.5,
        pid=10,
    )
    b = worker(
        "b", running=2, pages=Pages(4, 0, 1, 5), kv_cache=USAGE, ttft=Quantiles(2, 3, 4), last_step_age_s=0.1, pid=20
    )
    both = aggregate([a, b])
    assert both is not None and both.kv_cache == (KVUsage("full", 4, 11, 400), KVUsage("window", 2, 2, 50))
    assert (both.running, both.pid, both.last_step_age_s) == (3, 10, 0.5)
    assert both.pages == Pages(5, 2, 4, 11) and both.ttft == Quantiles(2, 3, 9)


def test_aggregate_counts_a_frontend_once_with_its_streams_everywhere() -> None:
    both = aggregate(
        [worker(name, frontends=(ConnectedFrontend("ab", 1, streams),)) for name, streams in (("a", 2), ("b", 3))]
    )
    assert both is not None and both.frontends == (ConnectedFrontend("ab", 1, 5),)


def test_aggregate_leaves_out_lost_workers_unless_all_are_lost() -> None:
    lost, alive = worker("a", connected=False, running=7), worker("b", running=1)
    assert [status.running for status in (aggregate([lost, alive]), aggregate([lost])) if status] == [1, 7]
