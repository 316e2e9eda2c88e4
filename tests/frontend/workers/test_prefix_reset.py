"""frontend/routes/health.py with fake workers. tests/wire/test_round_trip.py tests resets over the wire."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from frontend.errors import Overloaded
from frontend.routes import health as prefix_reset
from frontend.routes.health import reset_prefix_caches
from shared import messages as m
from tests.fakes import LIMITS, MODEL, READY_STATUS


@dataclass
class Worker:
    """A fake worker: confirms resets with the nonces of `confirms` in turn; 0 stands for the nonce of the request."""

    confirms: list[int]
    welcome: m.Welcome | None = field(default_factory=lambda: m.Welcome(1, 1, 1, MODEL, "", LIMITS))
    status: m.Status | None = READY_STATUS
    asked: int = 0

    def reset_prefix_cache(self, nonce: int) -> None:
        self.asked += 1
        if self.confirms:
            self.status = msgspec.structs.replace(READY_STATUS, prefix_cache_reset=self.confirms.pop(0) or nonce)


@dataclass
class Workers:
    connections: list[Worker]


async def test_all_workers_confirm() -> None:
    workers = Workers([Worker([0]), Worker([0])])
    assert await reset_prefix_caches(workers) == 2
    assert [worker.asked for worker in workers.connections] == [1, 1]


async def test_reset_hidden_by_another_frontends_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reset, "RESEND_S", 0.01)
    workers = Workers([Worker([0]), Worker([5, 0])])
    assert await asyncio.wait_for(reset_prefix_caches(workers), 60) == 2
    assert [worker.asked for worker in workers.connections] == [1, 2]


async def test_worker_without_an_answer_or_a_connection_is_named() -> None:
    workers = Workers([Worker([0]), Worker([]), Worker([0], welcome=None)])
    with pytest.raises(Overloaded, match="2 of 3 workers"):
        await reset_prefix_caches(workers, 0.05)
