"""/reset_prefix_cache: who may use it, and its answers. tests/e2e/test_neighbours.py tests its effect."""

import asyncio
from pathlib import Path

import httpx
import pytest

from frontend.routes import health as prefix_reset
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool
from tests.frontend.serving import app_over


async def reset(app: object, client: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=(client, 1))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        return await http.post("/reset_prefix_cache", headers=headers)


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "10.0.0.7", ""])
async def test_without_keys_nobody_may_wherever_the_request_comes_from(tokenizer: Tokenizer, client: str) -> None:
    pool = FakePool()
    # a client with a local address may be a proxy on this host, so the address gives no right
    answer = await reset(app_over(pool, tokenizer), client)
    assert answer.status_code == 403 and pool.resets == 0
    assert "--api-key" in answer.json()["error"]["message"]


async def test_the_only_tenant_may_and_of_several_only_an_administrator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pool, admins = FakePool(), tmp_path / "admins"
    admins.write_text("sk-admin boss\n")
    admins.chmod(0o600)
    one, several = app_over(pool, tokenizer, api_key="sk-one"), app_over(pool, tokenizer, api_key="sk-one,sk-two")
    managed = app_over(pool, tokenizer, api_key="sk-one", admin_keys=str(admins))
    open_ = app_over(pool, tokenizer, admin_keys=str(admins))
    statuses = [
        (await reset(app, "127.0.0.1", **({"Authorization": f"Bearer {key}"} if key else {}))).status_code
        for app, key in [
            (one, ""), (one, "sk-one"), (several, "sk-two"), (managed, "sk-one"), (managed, "sk-admin"), (open_, ""),
            (open_, "sk-other"), (open_, "sk-admin"),
        ]
    ]  # fmt: skip
    assert statuses == [401, 200, 403, 403, 200, 403, 403, 200] and pool.resets == 3


async def test_worker_that_does_not_confirm_is_503(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_reset.reset_prefix_caches, "__defaults__", (0.05,))
    pool = FakePool(deaf=True)
    app = app_over(pool, tokenizer, api_key="sk-one")
    answer = await asyncio.wait_for(reset(app, "127.0.0.1", Authorization="Bearer sk-one"), 30)
    assert answer.status_code == 503 and "1 of 1 workers" in answer.json()["error"]["message"]
