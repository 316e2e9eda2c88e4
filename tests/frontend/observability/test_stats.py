"""/stats."""

from typing import Any

from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from tests.fakes import FakePool
from tests.frontend.serving import http_client


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
    assert there["speculation"] == {"drafted": 9, "accepted": 5}
    assert there["worker"]["pid"] == 4711 and there["frontends"] == [{"pid": 12, "id": "ab", "streams": 3}]
    assert absent["frontends"] == [] and absent["running"] == 0 and absent["draining"] is False
