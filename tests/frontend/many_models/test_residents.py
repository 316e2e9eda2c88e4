"""The table of models under a launcher: requests wait for their model, keep it loaded, and learn why it failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend import launcher_link
from frontend.errors import BadRequest, Overloaded, Unprocessable
from frontend.loaded_models import LoadedModels
from frontend.observability.metrics import MAX_MODELS, PrometheusMetrics
from shared.launcher_messages import Keep, Unusable
from shared.model_list import Entry
from tests.frontend.many_models.launched import Launcher, launched
from tests.frontend.serving import until


@asynccontextmanager
async def models(
    factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch, *names: str, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LoadedModels, Launcher]]:
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


async def test_a_tokenizer_that_does_not_load_is_told_to_the_client_and_the_launcher(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model stayed loaded in place of others, and was loaded again for each request after that."""
    async with models(tmp_path_factory, monkeypatch, "a") as (http, _, launcher):
        (Path(launcher.checkpoint) / "tokenizer.json").write_text("{")
        asked = completion(http, "a")
        await launcher.until_wanted("a")
        launcher.tell("a", "loaded", attempts=1)
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
        told = await launcher.asked(Unusable)
        assert told.name == "a" and "tokenizer.json is not a tokenizer" in told.reason and told.reason in answer.text


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


async def test_a_new_table_adds_models_and_refuses_those_that_left_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a", "b") as (http, table, launcher):
        launcher.tell("a", "loaded", attempts=1)
        assert (await completion(http, "a")).status_code == 200
        pool, waiting = table.first.pool, completion(http, "b")
        await launcher.until_wanted("b")
        launcher.replace(Entry("x", name="c", aliases=("see",)))
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "model_not_found"), "b has left"
        assert (await completion(http, "a")).status_code == 422, "a is loaded, and not in the table any more"
        assert [model["id"] for model in (await http.post("/models?reload=1")).json()["data"]] == ["c", "see"]
        asked = completion(http, "see")
        await launcher.until_wanted("c")
        launcher.tell("c", "loaded", attempts=1)
        assert (await asked).json()["model"] == "c"
        assert not pool.closed, "until the launcher has unloaded it"
        del launcher.states["a"]
        launcher.tell("c", "loaded", attempts=1)
        await until(lambda: pool.closed)
        assert 'model_name="c"' in (await http.get("/metrics")).text


async def test_a_loaded_model_takes_its_changed_entry_when_it_is_unloaded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a") as (http, table, launcher):
        launcher.tell("a", "loaded", attempts=1)
        await completion(http, "a")
        launcher.replace(Entry("x", name="a", flags={"reasoning_format": "none"}))
        assert (await completion(http, "a")).status_code == 200
        assert table.first.config.reasoning_format == "auto"
        launcher.tell("a", "unloaded", attempts=1)
        await until(lambda: table.first.config.reasoning_format == "none")


async def test_a_table_that_cannot_be_read_again_is_told(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a") as (http, table, launcher):
        launcher.problem = "--models x: no such file"
        answer = await http.post("/models?reload=1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "table_not_read")
        assert "no such file" in answer.text
        await launcher.close()
        await until(lambda: not table.readiness.ready)
        by_link = await http.get("/models?reload=1")
        assert (by_link.status_code, by_link.headers["allow"]) == (405, "POST"), "any page may have a link"
        answer = await http.post("/models?reload=1")
        assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)


async def test_metrics_tell_of_each_model_what_its_worker_does_and_whether_it_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models(tmp_path_factory, monkeypatch, "a", "b", "c") as (http, _, launcher):
        launcher.tell("a", "loaded", attempts=3, nbytes=7)
        launcher.tell("b", "failed", reason="it is odd", attempts=1, nbytes=9)
        await completion(http, "a")
        waiting = completion(http, "c")
        await launcher.until_wanted("c")
        lines = set((await http.get("/metrics")).text.splitlines())
        expected = {
            "model_loaded": (1.0, 0.0, 0.0), "model_failed": (0.0, 1.0, 0.0), "model_load_waiters": (0.0, 0.0, 1.0),
            "model_load_attempts_total": (3.0, 1.0, 0.0), "model_memory_bytes": (7.0, 0.0, 0.0),
        }  # fmt: skip
        for name, values in expected.items():
            for model, value in zip("abc", values, strict=True):
                assert f'sluice_{name}{{model_name="{model}"}} {value}' in lines, name
        assert any(line.startswith('sluice_num_requests_waiting{model_name="a"}') for line in lines)
        launcher.tell("c", "loaded", attempts=1)
        assert (await waiting).status_code == 200


def test_names_beyond_a_bound_are_counted_together() -> None:
    metrics = PrometheusMetrics(names=["first"], on_demand=True)
    for index in range(MAX_MODELS + 2):
        metrics.of_model(str(index)).admitted(1)
    assert metrics.of_model("x") is metrics.of_model("y")
    assert len(metrics.models) == MAX_MODELS + 1
    assert metrics.of_model("first").name == "first"
