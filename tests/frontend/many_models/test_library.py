"""The routes of --allow-pull before a fake launcher: who may use them, what clients see, and names in lists."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.loaded_models import LoadedModels
from frontend.model_table import Asked
from frontend.routes import library
from frontend.server.http_protocol import ConnectionLimits
from shared.config.frontend import FrontendConfig
from shared.launcher_messages import Create, Delete, Done, Download, Forget, Keep, Pull
from shared.model_library import write_presets
from shared.preset import Preset, Told
from tests.frontend.many_models.launched import Launcher, launched
from tests.frontend.serving import Raw, serving, until
from tests.patience import PATIENCE_S

ROUTES = (
    ("POST", "/api/pull", {"model": "x"}), ("POST", "/api/create", {"model": "x", "from": "a"}),
    # a template costs whoever compiles it, so it is not even looked at
    ("POST", "/api/create", {"model": "x", "from": "a", "template": "{{"}),
    ("POST", f"/api/blobs/sha256:{'0' * 64}", {}),
    ("POST", "/api/copy", {"source": "a", "destination": "x"}), ("DELETE", "/api/delete", {"model": "a"}),
)  # fmt: skip


@asynccontextmanager
async def server(
    factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Launcher, LoadedModels]]:
    limits = ConnectionLimits.of(FrontendConfig())
    async with (
        launched(factory.mktemp("r"), patch, "a", **{"allow_pull": True, **config}) as (app, table, launcher),
        serving(app, limits) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        launcher.tell("a", "unloaded")
        await until(lambda: table.readiness.ready)
        yield http, launcher, table


async def test_without_the_flag_every_route_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch, allow_pull=False) as (http, launcher, _):
        for method, path, body in ROUTES:
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 403 and "--allow-pull" in answer.json()["error"], path
        assert "allows_pull" not in (await http.get("/v1/models")).json()
        assert not any(isinstance(one, Pull | Create | Delete) for one in launcher.heard)


async def test_template_that_is_costly_to_compile_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jinja computes constants while it compiles: this one has 40 million digits."""
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, _):
        answer = await http.post("/api/create", json={"model": "x", "from": "a", "template": "{{ 9**(9**8) }}"})
        assert answer.status_code == 400 and "takes longer than 2.0 s" in answer.json()["error"], answer.text
        assert not any(isinstance(one, Create) for one in launcher.heard)


async def test_only_administrators_may_where_there_are_keys(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    admins = tmp_path / "admins"
    admins.write_text("sk-admin boss\n")
    admins.chmod(0o600)
    keys = {"api_key": "sk-one", "admin_keys": str(admins)}
    async with server(tmp_path_factory, monkeypatch, **keys) as (http, launcher, _):
        for method, path, body in ROUTES:
            for key, status in (("sk-one", 403), ("", 401)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = await http.request(method, path, json=body, headers=headers)
                assert answer.status_code == status, (path, key)
        headers = {"Authorization": "Bearer sk-admin"}
        asking = asyncio.create_task(http.request("DELETE", "/api/delete", json={"model": "a"}, headers=headers))
        launcher.send(Done((await launcher.asked(Delete)).ticket))
        assert (await asking).status_code == 200


async def test_a_pull_shows_its_progress_and_its_one_end(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, _):
        asking = asyncio.create_task(http.post("/api/pull", json={"model": "x:latest"}))
        order = await launcher.asked(Pull)
        assert order.name == "x"
        launcher.send(
            Download("other", "pulling 1", "sha256:1", 9, 1), Download("x", "pulling 2", "sha256:2", 10, 5),
            Download("x", "", error="an earlier one"), Download("x", "writing manifest"), Done(order.ticket + 1, "no"),
            Done(order.ticket),
        )  # fmt: skip
        said = [json.loads(line) for line in (await asking).text.splitlines()]
        assert [line for n, line in enumerate(said) if line not in said[:n]] == [
            {"status": "pulling manifest"},
            {"status": "pulling 2", "digest": "sha256:2", "total": 10, "completed": 5},
            {"status": "writing manifest"}, {"status": "success"},
        ]  # fmt: skip
        for problem, code, status in (("gone", "model_not_found", 404), ("x", "busy", 503), ("y", "pull_failed", 400)):
            asking = asyncio.create_task(http.post("/api/pull", json={"model": "y", "stream": False}))
            launcher.heard.clear()
            launcher.send(Done((await launcher.asked(Pull)).ticket, problem, code))
            answer = await asking
            assert (answer.status_code, answer.json()) == (status, {"error": problem})


async def test_the_launcher_learns_that_a_client_has_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "AGAIN_S", 0.01)
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, _):
        for stream in (True, False):
            launcher.heard.clear()
            client = await Raw.post(str(http.base_url).rstrip("/"), "/api/pull", {"model": "x", "stream": stream})
            order = await launcher.asked(Pull)
            if stream:
                await client.reader.readuntil(b"pulling manifest")
            await client.leave()
            assert (await launcher.asked(Forget)).ticket == order.ticket


async def test_a_lost_launcher_ends_every_wait(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, _):
        asking = asyncio.create_task(http.post("/api/pull", json={"model": "x"}))
        await launcher.asked(Pull)
        await launcher.close()
        lines = [json.loads(line) for line in (await asking).text.splitlines()]
        assert [*lines[-1]] == ["error"] and "no connection to the launcher" in lines[-1]["error"]
        assert (await http.request("DELETE", "/api/delete", json={"model": "a"})).status_code == 503
        await launcher.open()


async def test_slow_clients_get_the_newest_news_of_a_file_and_keep_nothing_in_memory() -> None:
    asked = Asked("x", None)
    for n in range(10_000):
        asked.add(Download("x", "pulling 1", "sha256:1", 10_000, n))
    asked.add(Download("x", "pulling 2", "sha256:2", 1, 1))
    asked.end(Done(1))
    assert [(one.digest, one.completed) async for one in asked.lines()] == [("sha256:1", 9999), ("sha256:2", 1)]
    assert await asked.done() == Done(1)


async def test_events_tell_states_and_downloads(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch, keepalive_s=0.05) as (http, launcher, _):
        launcher.send(Download("a", "pulling 1", "sha256:1", 4, 1))
        async with http.stream("GET", "/models/sse") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert await event(lines) == {"model": "a", "event": "model_status", "data": {"status": "unloaded"}}
            data = {"status": "pulling 1", "digest": "sha256:1", "total": 4, "completed": 1}
            assert await event(lines) == {"model": "a", "event": "download_progress", "data": data}
            listed = (await http.get("/v1/models")).json()
            assert listed["data"][0]["status"] | {"reason": None} == {
                "value": "unloaded", "reason": None, "on_demand": True, "progress": 0.25,
            }  # fmt: skip
            launcher.send(Download("a", "success"))
            assert (await event(lines))["event"] == "download_finished"
            launcher.tell("a", "failed", reason="why")
            assert (await event(lines))["data"] == {"status": "failed", "reason": "why"}
            launcher.send(Download("b", "", error="gone"))
            assert await event(lines) == {"model": "b", "event": "download_failed", "data": {"error": "gone"}}


async def event(lines: AsyncIterator[str]) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream has ended")


async def test_names_are_listed_and_mean_their_model(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, table):
        preset = Preset("a", system="Be brief.", parameters={"num_predict": 2}, messages=(Told("user", "hi"),))
        write_presets(launcher.table.parent, {"mine": preset, "lost": Preset("gone"), "a": Preset("a")})
        launcher.replace(*[table._entries["a"]])
        launcher.tell("a", "loaded")
        await until(lambda: table.get("mine") is not None and table.get("mine").service.readiness.ready)  # type: ignore[union-attr]
        listed = (await http.get("/v1/models")).json()
        assert [(one["id"], one["parent"], one["status"]["value"]) for one in listed["data"]] == [
            ("a", None, "loaded"), ("mine", "a", "loaded"),
        ]  # fmt: skip
        assert listed["allows_pull"] is True
        said = {"messages": [{"role": "user", "content": "Hi"}]}
        plain, own = [
            (await http.post("/v1/chat/completions", json={"model": name, **said})).json() for name in ("a", "mine")
        ]
        assert (plain["model"], own["model"]) == ("a", "mine")
        assert own["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        assert plain["system_fingerprint"] != own["system_fingerprint"]
        assert (await http.post("/v1/chat/completions", json={"model": "lost", **said})).status_code == 404
        for path in ("/api/chat", "/api/show"):
            lost = await http.post(path, json={"model": "lost"} | (said if path == "/api/chat" else {}))
            assert (lost.status_code, lost.json()) == (404, {"error": "model 'lost' not found"})
        assert (await http.post("/models/unload", json={"model": "mine"})).json() == {"success": True}
        assert (await launcher.asked(Keep)).name == "a"
