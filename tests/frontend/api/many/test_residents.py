"""The table of models under a launcher: requests wait for their model, hold it, and learn why there is none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from frontend.api.many import launcher_link
from frontend.api.many.residents import Residents
from frontend.errors import BadRequest, Overloaded, Unprocessable
from shared.models.messages import Keep
from tests.frontend.api.many.launched import Launcher, launched
from tests.frontend.serving import until


@asynccontextmanager
async def models(
    factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch, *names: str, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Residents, Launcher]]:
    patch.setattr(launcher_link, "LINGER_S", 0.0)
    async with launched(factory.mktemp("r"), patch, *names, **settings) as (app, table, launcher):
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://sluice") as http,
        ):
            launcher.tell(names[0], "unloaded")
            await until(lambda: table.readiness.ready)
            yield http, table, launcher


def completion(http: httpx.AsyncClient, model: str | None) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(http.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 9}))


async def test_requests_share_one_load_and_hold_the_model_until_they_end(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a", "b") as (http, _, launcher):
        asked = [completion(http, "a") for _ in range(3)]
        await launcher.until_wanted("a")
        launcher.tell("a", "loading", attempts=1)
        launcher.tell("a", "loaded", attempts=1)
        for one in asked:
            answer = await one
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hello"), answer.text
        assert any(getattr(one, "used", ()) == ("a",) for one in launcher.heard), "it was held"
        await until(lambda: launcher.seen.used == launcher.seen.wanted == ())
        assert (await completion(http, None)).json()["model"] == "a", "the only one that is loaded"
        assert not any("b" in getattr(one, "wanted", ()) for one in launcher.heard)


async def test_an_unloaded_model_leaves_nothing_and_is_loaded_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a") as (http, table, launcher):
        for attempt in (1, 2):
            asked = completion(http, "a")
            await launcher.until_wanted("a")
            launcher.tell("a", "loaded", attempts=attempt)
            assert (await asked).status_code == 200
            pool = table.first.pool
            launcher.tell("a", "unloaded", attempts=attempt)
            await until(lambda pool=pool: pool.closed)
            assert not table.first.service.has_tokenizer


async def test_failures_are_told_and_not_tried_again_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a", "b") as (http, _, launcher):
        asked = completion(http, "a")
        await launcher.until_wanted("a")
        launcher.tell("a", "failed", reason="its config is odd", attempts=1)
        for answer in (await asked, await completion(http, "a")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
            assert "its config is odd" in answer.text and answer.headers["Retry-After"]


async def test_waiting_has_an_end_and_mistakes_are_refused_without_a_load(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a", load_wait=0.05) as (_, table, launcher):
        with pytest.raises(Unprocessable, match="absent"):
            await table.usable(table.find("absent"), "absent")
        with pytest.raises(BadRequest, match="keep_alive"):
            await table.usable(table.first, "a", keep_alive="soon")
        assert not any(getattr(one, "wanted", ()) for one in launcher.heard)
        with pytest.raises(Overloaded, match="not ready in time"):
            await table.usable(table.first, "a")
        await until(lambda: launcher.seen.wanted == ())
        assert not table.waited_for(asyncio.current_task())


async def test_orders_reach_the_launcher_and_a_lost_one_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a") as (http, table, launcher):
        table.keep("a", 30.0)
        await until(lambda: Keep("a", 30.0) in launcher.heard)
        await launcher.close()
        await until(lambda: not table.readiness.ready)
        asked = completion(http, "a")
        await launcher.open()
        await launcher.until_wanted("a")
        launcher.tell("a", "loaded", attempts=1)
        assert (await asked).status_code == 200
