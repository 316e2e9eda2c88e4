"""What changes a server for others needs a key of --admin-keys, on every route; such a key may do all else, too."""

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, sending
from tests.frontend.many_models.launched import launched
from tests.frontend.serving import app_over

CHANGES = (
    ("POST", "/sleep", None), ("POST", "/wake_up", None), ("POST", "/reset_prefix_cache", None),
    ("POST", "/flush_cache", None), ("GET", "/flush_cache", None), ("POST", "/models?reload=1", None),
    ("POST", "/models/load", {"model": "a"}), ("POST", "/models/unload", {"model": "a"}),
)  # fmt: skip


@pytest.fixture
def admins(tmp_path: Path) -> str:
    (tmp_path / "admins").write_text("sk-admin boss\n")
    (tmp_path / "admins").chmod(0o600)
    return str(tmp_path / "admins")


def client(app: Starlette, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sluice", headers=headers)


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_ordinary_keys_may_not_change_the_server(
    tokenizer: Tokenizer, admins: str, method: str, path: str, body: object
) -> None:
    for keys, key in [
        ({"api_key": "sk-one", "admin_keys": admins}, "sk-one"),
        ({"api_key": "sk-one,sk-two"}, "sk-two"),
    ]:
        async with client(app_over(FakePool(), tokenizer, **keys), key) as http:
            answer = await http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_only"), answer.text
            assert "--admin-keys" in answer.text


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_a_key_of_an_administrator_may(
    tokenizer: Tokenizer, admins: str, method: str, path: str, body: object
) -> None:
    async with client(app_over(FakePool(), tokenizer, api_key="sk-one", admin_keys=admins), "sk-admin") as http:
        answer = await http.request(method, path, json=body)
        assert answer.status_code not in (401, 403), answer.text


async def test_an_administrators_key_serves_requests_and_a_wrong_key_does_not(
    tokenizer: Tokenizer, admins: str
) -> None:
    app = app_over(FakePool(sending([104])), tokenizer, api_key="sk-one", admin_keys=admins)
    for key, status in [("sk-admin", 200), ("sk-one", 200), ("sk-two", 401), ("", 401)]:
        async with client(app, key) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == status


async def test_keep_alive_of_an_ordinary_key_unloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admins: str
) -> None:
    (tmp_path / "run").mkdir()
    async with (
        launched(tmp_path / "run", monkeypatch, "a", api_key="sk-one", admin_keys=admins) as (app, table, launcher),
        app.router.lifespan_context(app),
    ):
        launcher.tell("a", "loaded", attempts=1)
        kept: list[tuple[str, float | None]] = []
        monkeypatch.setattr(table, "keep", lambda name, seconds: kept.append((name, seconds)))
        body = {"model": "a", "prompt": "Hi", "stream": False, "keep_alive": 0, "options": {"num_predict": 1}}
        for key in ("sk-one", "sk-admin"):
            async with client(app, key) as http:
                answer = await http.post("/api/generate", json=body)
                assert answer.status_code == 200, answer.text
                assert (answer.headers.get("x-sluice-ignored-fields") == "keep_alive") is (key == "sk-one")
        assert kept == [("a", 0.0)]


async def test_metrics_name_other_keys_only_to_administrators(
    tokenizer: Tokenizer, tmp_path: Path, admins: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a alice\nsk-b bob\nsk-bo bo\n")
    keys.chmod(0o600)
    for more, names in [({"admin_keys": admins}, {"sk-admin": {"alice", "bob", "bo", "boss"}}), ({}, {})]:
        app = app_over(FakePool(sending([104])), tokenizer, api_keys=str(keys), **more)
        for key in ("sk-a", "sk-b", "sk-bo", *names):
            async with client(app, key) as http:
                await http.get("/version")
        for key, seen in {"sk-a": {"alice"}, "sk-b": {"bob"}, "sk-bo": {"bo"}, **names}.items():
            async with client(app, key) as http:
                page, stats = (await http.get("/metrics")).text, (await http.get("/stats")).text
                assert set(re.findall(r'key="([^"]*)"', page)) == seen
                assert not [name for name in ("alice", "bob", "boss") if name in stats]
                assert all(name in seen or name not in page for name in ("alice", "bob", "boss"))
