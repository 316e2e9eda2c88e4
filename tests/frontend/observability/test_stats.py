"""Tests of frontend/observability/stats.py."""

from typing import Any

import msgspec

from frontend.observability.stats import Pool, stats
from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import ConnectionState, WorkerStatus, not_ready
from tests.fakes import READY_STATUS, FakePool
from tests.frontend.serving import http_client

SECOND = msgspec.structs.replace(READY_STATUS, epoch=7, pid=4712, running=5, waiting=0)


def test_stats_without_a_worker_are_zeros_and_its_state_absent() -> None:
    document = stats([Pool([], "tiny")], draining=False)
    assert document.worker.state == "absent" and document.worker.model == "tiny"
    assert (document.running, document.workers, document.draining) == (0, [], False)


def test_stats_of_several_workers_are_sums_and_the_first_worker() -> None:
    first = WorkerStatus("a", ConnectionState.READY, "ready", READY_STATUS, streams=3, load=100)
    second = WorkerStatus("b", ConnectionState.LOST, "worker lost", SECOND)
    document = stats([Pool([first, second], "tiny")], draining=False)
    assert (document.running, document.waiting) == (7, 1)
    assert (document.worker.epoch, document.worker.state) == (1, "ready")
    rows = [(row.address, row.ready, row.reason, row.streams, row.load) for row in document.workers]
    assert rows == [("a", True, "ready", 3, 100), ("b", False, "worker lost", 0, 0)]


def test_drafts_of_several_workers_are_added_by_position() -> None:
    first = WorkerStatus("a", ConnectionState.READY, "ready", READY_STATUS)
    other = msgspec.structs.replace(READY_STATUS, drafted_at=(1, 1, 1), accepted_at=(1,))
    second = WorkerStatus("b", ConnectionState.READY, "ready", other)
    told = stats([Pool([first, second], "tiny")], draining=False).speculation
    assert (told.drafted_at, told.accepted_at) == ([7, 4, 1], [5, 1])


def test_stats_are_draining_when_the_frontend_or_all_workers_drain() -> None:
    ready = WorkerStatus("a", ConnectionState.READY, "ready", READY_STATUS)
    draining = WorkerStatus("b", ConnectionState.DRAINING, "draining", READY_STATUS)
    assert stats([Pool([ready], "tiny")], draining=True).draining is True
    assert stats([Pool([draining, draining], "tiny")], draining=False).draining is True
    assert stats([Pool([ready, draining], "tiny")], draining=False).draining is False


async def test_stats_have_one_shape_with_and_without_a_worker(tokenizer: Tokenizer) -> None:
    def shape(value: Any) -> Any:
        return {key: shape(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value)

    async with http_client(FakePool(), tokenizer) as http:
        there = (await http.get("/stats")).json()
    async with http_client(
        FakePool(status=None, welcome=None, readiness=not_ready("no worker yet")), tokenizer
    ) as http:
        absent = (await http.get("/stats")).json()
    assert shape(there) == shape(absent)
    assert there["pages"] == {"free": 6, "cached": 3, "owned": 1, "total": 10}
    assert (there["running"], there["waiting"], there["prefix"]) == (2, 1, {"queries": 100, "hits": 40})
    assert there["kv_cache"] == {
        "full": {"owned": 1, "total": 10, "bytes": 4096}, "window": {"owned": 2, "total": 5, "bytes": 1024},
        "state": {"owned": 3, "total": 7, "bytes": 2048},
    }  # fmt: skip
    assert there["speculation"] == {"drafted": 9, "accepted": 5, "drafted_at": [6, 3], "accepted_at": [4, 1]}
    assert there["worker"]["pid"] == 4711 and there["frontends"] == [{"pid": 12, "id": "ab", "streams": 3}]
    assert absent["frontends"] == [] and absent["running"] == 0 and absent["draining"] is False
