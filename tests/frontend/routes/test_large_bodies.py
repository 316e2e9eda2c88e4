"""Large bodies: what is wrong in them is looked for off the event loop, and how many values they may have."""

import asyncio
import json
import threading
from typing import Any

import pytest

from frontend import app_state
from frontend.schema.decoding import MOST_CONTAINERS, decode_valid
from frontend.text.tokenizer import Tokenizer
from frontend.turns import FairThreads
from tests.fakes import MODEL
from tests.frontend.serving import completing, http_client

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"}, "/api/generate": {"prompt": "a"}, "/generate": {"text": "a"},
    "/completion": {"prompt": "a"}, "/tokenize": {"content": 5}, "/v1/embeddings": {"input": {}},
    "/v1/rerank": {"query": "a", "documents": 5},
}  # fmt: skip


class Noted(FairThreads):
    """Threads that count what they run."""

    runs = 0

    async def run(self, function: Any, *arguments: Any) -> Any:
        self.runs += 1
        return await super().run(function, *arguments)


@pytest.mark.parametrize("route", ROUTES)
async def test_errors_of_large_bodies_are_found_in_threads(
    route: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Noted("test-errors", 1)
    monkeypatch.setattr(app_state, "SEARCHES", threads)
    wrong = {"model": MODEL, **ROUTES[route], "stream": "yes", "text": 5}
    async with http_client(completing(tokenizer), tokenizer) as http:
        small = await http.post(route, json=wrong)
        assert small.status_code in (400, 422) and not threads.runs
        large = await http.post(route, json=wrong | {"unknown": [0] * 50_000})
        many = b'{"model":"%b","unknown":[' % MODEL.encode() + b"[]," * MOST_CONTAINERS + b"1]}"
        refused = await http.post(route, content=many, headers={"Content-Type": "application/json"})
    assert (large.status_code, large.json()) == (small.status_code, small.json()) and threads.runs == 1
    assert refused.status_code == 400 and "at most 262144 arrays and objects" in json.dumps(refused.json())
    threads.close()


async def test_large_bodies_are_decoded_one_after_another_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noted(body: bytes, kind: type[Any]) -> Any:
        names.append(threading.current_thread().name)
        return decode_valid(body, kind)

    monkeypatch.setattr(app_state, "decode_valid", noted)
    async with http_client(completing(tokenizer), tokenizer) as http:
        asked = {"content": "a" * 100_000}
        answers = await asyncio.gather(*(http.post("/tokenize", json=asked) for _ in range(4)))
    assert [one.status_code for one in answers] == [200] * 4
    assert len(names) == 4 and len(set(names)) == 1 and names[0].startswith("bodies")
