"""Sleep and wake: who may ask for them, how requests are answered meanwhile, and that /is_sleeping tells the truth."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette

from frontend import launcher_link
from shared.launcher_messages import Sleep
from tests.fakes import FakePool, sending
from tests.frontend.many_models.launched import launched
from tests.frontend.serving import app_over, until

KEY = {"Authorization": "Bearer secret"}


def client(app: Starlette, **more: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sluice", headers=more)


async def test_requests_are_refused_until_it_wakes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("s")
    async with (
        launched(folder, monkeypatch, "a", "b", api_key="secret") as (app, table, launcher),
        app.router.lifespan_context(app),
        client(app, **KEY) as http,
    ):
        launcher.tell("a", "loaded", attempts=1)
        await until(lambda: table.readiness.ready)
        body = {"model": "a", "prompt": "Hi", "max_tokens": 9}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        waiting = asyncio.create_task(http.post("/v1/completions", json={**body, "model": "b"}))
        await launcher.until_wanted("b")
        asked = asyncio.create_task(http.post("/sleep?level=2"))
        await until(lambda: Sleep(True) in launcher.heard)
        launcher.asleep = True
        launcher.tell("a", "unloading", attempts=1)
        refused = [await waiting, await http.post("/v1/completions", json=body)]
        assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(503, "asleep")] * 2
        assert all(one.headers["Retry-After"] for one in refused)
        assert (await http.get("/ready")).json()["reason"] == "asleep"
        assert not asked.done(), "a model is still in memory"
        launcher.tell("a", "unloaded", attempts=1)
        assert (await asked).json() == (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        asked = asyncio.create_task(http.post("/wake_up"))
        await until(lambda: Sleep(False) in launcher.heard)
        assert not asked.done()
        launcher.asleep = False
        launcher.tell("a", "loaded", attempts=2)
        assert (await asked).json() == (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        monkeypatch.setattr(launcher_link, "MOST_SLEEP_WAIT_S", 0.1)
        late = await http.post("/sleep")
        assert (late.status_code, "requests still need" in late.text) == (503, True)
        assert (await http.post("/sleep?level=3")).json()["error"]["param"] == "level"


async def test_only_servers_with_keys_and_many_models_sleep(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(tmp_path_factory.mktemp("s"), monkeypatch, "a") as (app, _, launcher), client(app) as http:
        assert [(await http.post(path)).status_code for path in ("/sleep", "/wake_up")] == [403, 403]
        assert not any(isinstance(one, Sleep) for one in launcher.heard)
    async with client(app_over(FakePool(sending([])), None, api_key="secret"), **KEY) as http:
        refused = await http.post("/sleep")
        assert (refused.status_code, "one model" in refused.text) == (400, True)
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
