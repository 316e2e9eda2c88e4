"""The contents of /props, /slots and /lora-adapters, and who may read them."""

import asyncio
from pathlib import Path

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from shared.messages import Limits, Welcome
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import app_over, http_client, until


async def test_properties(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        props = (await http.get("/props")).json()
        models = (await http.get("/models")).json()
    assert (props["total_slots"], props["model_alias"], props["is_sleeping"]) == (1, MODEL, False)
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["default_generation_settings"]["params"]["n_predict"] == -1
    assert (props["eos_token"], props["chat_template"]) == ("", tokenizer.templates["default"])
    assert [one["id"] for one in models["data"]] == [MODEL]


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_needs_no_key(tokenizer: Tokenizer, tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one one\n")
    keys.chmod(0o600)
    async with http_client(FakePool(), tokenizer, api_keys=str(keys)) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


async def test_slots_show_a_key_only_its_own_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one one\nsk-two two\n")
    keys.chmod(0o600)
    pool = FakePool()
    transport = httpx.ASGITransport(app_over(pool, tokenizer, api_keys=str(keys)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        own, other = ({"x-api-key": key} for key in ("sk-one", "sk-two"))
        asking = asyncio.create_task(http.post("/completion", json={"prompt": "Hi"}, headers=own))
        await until(lambda: pool.submitted)
        pool.send_tokens(pool.submitted[0].stream, [64])
        mine, theirs = [(await http.get("/slots", headers=header)).json() for header in (own, other)]
        pool.end(pool.submitted[0].stream)
        assert (await asking).json()["content"] == "a"
        after = (await http.get("/slots", headers=own)).json()
    assert mine == [
        {"id": 0, "n_ctx": 512, "speculative": False, "is_processing": True, "n_prompt_tokens": 3,
         "next_token": {"n_decoded": 1}}
    ]  # fmt: skip
    assert theirs == after == [{"id": 0, "n_ctx": 512, "speculative": False, "is_processing": False}]


@pytest.mark.parametrize(("batch", "status"), [(0, 200), (4, 200), (3, 503)])
async def test_slots_are_the_sequences_that_run_at_once(tokenizer: Tokenizer, batch: int, status: int) -> None:
    limits = Limits(512, tokenizer.vocab_size, (265,), max_sequences=batch + 1000, max_batch=batch)
    pool = FakePool(welcome=Welcome(1, 1, 4711, MODEL, "", limits))  # limits: two sequences run, and one waits
    async with http_client(pool, tokenizer) as http:
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == status
        assert len((await http.get("/slots")).json()) == max(1, batch)
        assert (await http.get("/props")).json()["total_slots"] == max(1, batch)
        assert (await http.get("/server_info")).json()["max_running_requests"] == max(1, batch)


async def test_there_are_no_more_slots_than_run_at_once(tokenizer: Tokenizer) -> None:
    limits = Limits(512, tokenizer.vocab_size, (265,), max_sequences=9, max_batch=1)
    pool = FakePool(welcome=Welcome(1, 1, 4711, MODEL, "", limits))
    async with http_client(pool, tokenizer) as http:
        asking = [asyncio.create_task(http.post("/completion", json={"prompt": text})) for text in ("Hi", "Ho, ho")]
        await until(lambda: len(pool.submitted) == 2)
        pool.send_tokens(pool.submitted[1].stream, [64])
        [slot] = (await http.get("/slots")).json()
        for one in pool.submitted:
            pool.end(one.stream)
        await asyncio.gather(*asking)
    assert slot["next_token"] == {"n_decoded": 1}, "the one that has output"


async def test_there_are_no_adapters(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        assert (await http.get("/lora-adapters")).json() == []


async def test_server_that_is_loading_says_so_in_llama_cpps_words(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), None) as http:
        for path in ("/props", "/slots"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")


async def test_actions_on_slots_are_refused_in_words(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        for action in ("save", "restore", "erase"):
            refused = await http.post(f"/slots/0?action={action}", json={"filename": "a"})
            assert refused.status_code == 501
            assert "--kv-store" in refused.json()["error"]["message"]
