"""Adapters as models, and the routes that load and unload them, over a pool without workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.app import create_app
from frontend.errors import Unprocessable
from frontend.lora import AdapterRegistry
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.text.tokenizer import Tokenizer
from shared.config.frontend import FrontendConfig
from shared.config.settings import ModelConfig
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.speaking import tokenizer_with

LOAD, UNLOAD, DEFAULT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_with(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    for index in range(2):
        draw_adapter(checkpoints("llama"), tmp_path / "all" / f"a{index}", index, targets=("q_proj",))
    return tmp_path / "all"


@asynccontextmanager
async def served(pool: FakePool, tokenizer: Tokenizer, **model: str) -> AsyncIterator[httpx.AsyncClient]:
    loading: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    loading.set_result(tokenizer)
    config, metrics = FrontendConfig(access_log="off", allowed_hosts="*"), PrometheusMetrics()
    base = ServedModel.of((MODEL,), config, pool, loading, metrics.models[""])
    registry = AdapterRegistry(ModelConfig(model="/base", served_model_name=MODEL, **model)) if model else None
    transport = httpx.ASGITransport(create_app(config, ModelTable([base], registry), metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        yield http


def answering(tokenizer: Tokenizer) -> FakePool:
    return FakePool(sending(tokenizer.encode_now(["hello"], False)[0]))


async def ask(http: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 9, **more})


async def test_a_request_chooses_an_adapter_by_the_name_of_its_model(tokenizer: Tokenizer, folder: Path) -> None:
    pool = answering(tokenizer)
    async with served(pool, tokenizer, lora_modules=f"one={folder / 'a0'} two={folder / 'a1'}") as http:
        answers = {name: (await ask(http, name)).json() for name in (MODEL, "one", "two")}
        listed = (await http.get("/v1/models")).json()["data"]
        alone = (await http.get("/v1/models/one")).json()
        refused = await ask(http, "three")
    submits = [one.stream.submit for one in pool.submitted]
    assert [one.adapter and one.adapter.name for one in submits] == [None, "one", "two"]
    assert len({one.cache_salt for one in submits}) == 3, "they share no prefixes"
    assert submits[1].adapter is not None and submits[1].adapter.sha256 in submits[1].cache_salt
    assert [answer["model"] for answer in answers.values()] == [*answers]
    fingerprints = [answer["system_fingerprint"] for answer in answers.values()]
    assert len({*fingerprints}) == 3 and fingerprints == [one["fingerprint"] for one in listed]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        (MODEL, MODEL, None), ("one", "a0", MODEL), ("two", "a1", MODEL),
    ]  # fmt: skip
    assert alone == listed[1] and refused.status_code == 422


async def test_llama_cpps_requests_choose_an_adapter_by_its_place_and_scale_it(
    tokenizer: Tokenizer, folder: Path
) -> None:
    pool = answering(tokenizer)
    scales: list[list[dict[str, Any]]] = [
        [], [{"id": 0, "scale": 0}], [{"id": 1, "scale": 0.5}, {"id": 0, "scale": 0.0}], [{"id": 1, "scale": 1}],
    ]  # fmt: skip
    async with served(pool, tokenizer, lora_modules=f"one={folder / 'a0'} two={folder / 'a1'}") as http:
        listed = await http.get("/lora-adapters")
        assert [one["path"] for one in listed.json()] == ["a0", "a1"] and str(folder) not in listed.text
        for lora in scales:
            answer = await http.post("/completion", json={"prompt": "Hi", "n_predict": 9, "lora": lora})
            assert answer.status_code == 200, answer.text
        await ask(http, "two")
        for lora in ([{"id": 2, "scale": 1}], [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], [{"id": -1, "scale": 1}]):
            refused = await http.post("/completion", json={"prompt": "Hi", "lora": lora})
            assert refused.status_code == 400 and "lora" in refused.text
    submits = [one.stream.submit for one in pool.submitted]
    assert [one.adapter and (one.adapter.name, one.adapter.scale) for one in submits] == [
        None, None, ("two", 0.5), ("two", 1.0), ("two", 1.0),
    ]  # fmt: skip
    assert len({one.cache_salt for one in submits}) == 3, "each scale has prefixes of its own"
    assert submits[3].cache_salt == submits[4].cache_salt


async def test_default_scales_choose_the_adapter_of_requests_that_name_none(tokenizer: Tokenizer, folder: Path) -> None:
    pool = answering(tokenizer)
    flags = {"lora_modules": f"one={folder / 'a0'} two={folder / 'a1'}", "allow_runtime_lora": str(folder)}

    async with served(pool, tokenizer, **flags) as http:

        async def used(path: str = "/completion", **body: Any) -> tuple[str, float] | None:
            answer = await http.post(path, json={"prompt": "Hi", "max_tokens": 9, **body})
            assert answer.status_code == 200, answer.text
            adapter = pool.submitted[-1].stream.submit.adapter
            return adapter and (adapter.name, adapter.scale)

        async def set_scales(scales: Any) -> list[float]:
            answer = await http.post(DEFAULT, json=scales)
            assert answer.json() == {"success": True}, answer.text
            return [one["scale"] for one in (await http.get(DEFAULT)).json()]

        assert await set_scales([{"id": 1, "scale": 0.5}]) == [0.0, 0.5]
        assert (
            await used() == await used("/v1/completions") == await used("/v1/completions", model=MODEL) == ("two", 0.5)
        )
        assert await used("/v1/completions", model="one") == ("one", 1.0)
        assert await used(lora=[]) is None and await used(lora=[{"id": 1, "scale": 0.0}]) is None
        assert await used(lora=[{"id": 0, "scale": 2.0}]) == ("one", 2.0)
        listed = (await http.get(DEFAULT)).json()
        assert await set_scales([{**listed[0], "scale": -1.0}]) == [-1.0, 0.0], "what a list lacks gets 0"
        assert (await http.post(UNLOAD, json={"lora_name": "one"})).status_code == 200
        assert await used() is None, "the default adapter was unloaded"
        assert (await http.post(LOAD, json={"lora_name": "one", "lora_path": str(folder / "a0")})).status_code == 200
        assert await used() is None, "and comes back without its scale"
        assert await set_scales([{"id": 0, "scale": 1.0}]) == [1.0, 0.0] and await used() == ("one", 1.0)
        assert await set_scales([]) == [0.0, 0.0] and await used() is None


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([{"id": 2, "scale": 1}], "there is no adapter 2"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "only one adapter"),
        ([{"id": -1, "scale": 1}], "adapters[0].id"),
        ([{"id": 0, "scale": 1e39}], "adapters[0].scale"),
        ([{"id": 0}], "scale"),
        ([{"id": 0, "scale": 0}] * 1001, "adapters"),
        ({"id": 0, "scale": 1}, "must be an array"),
    ],
)  # fmt: skip
async def test_wrong_default_scales_are_refused_and_change_nothing(
    scales: Any, words: str, tokenizer: Tokenizer, folder: Path
) -> None:
    flags = {"lora_modules": f"one={folder / 'a0'} two={folder / 'a1'}", "allow_runtime_lora": str(folder)}
    async with served(answering(tokenizer), tokenizer, **flags) as http:
        await http.post(DEFAULT, json=[{"id": 0, "scale": 0.25}])
        refused = await http.post(DEFAULT, json=scales)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
        assert [one["scale"] for one in (await http.get(DEFAULT)).json()] == [0.25, 0.0]


async def test_adapter_made_for_another_base_is_loaded_with_a_warning(tokenizer: Tokenizer, folder: Path) -> None:
    config = folder / "a0/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"base_model_name_or_path": "org/Other-8B"}))
    async with served(answering(tokenizer), tokenizer, allow_runtime_lora=str(folder)) as http:
        loaded = await http.post(LOAD, json={"lora_name": "x", "lora_path": str(folder / "a0")})
    assert loaded.status_code == 200 and "Warning: it was made for org/Other-8B, not for tiny" in loaded.text


async def test_adapters_are_loaded_and_unloaded_by_name(tokenizer: Tokenizer, folder: Path) -> None:
    pool = answering(tokenizer)
    async with served(pool, tokenizer, allow_runtime_lora=str(folder)) as http:
        body = {"lora_name": "x", "lora_path": str(folder / "a0")}
        loaded = await http.post(LOAD, json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert pool.submitted[0].stream.submit.adapter is not None, "a worker has tried it"
        again = await http.post(LOAD, json=body)
        assert again.status_code == 400 and "'load_inplace' to True" in again.json()["error"]["message"]
        before = (await ask(http, "x")).json()["system_fingerprint"]
        body |= {"lora_path": str(folder / "a1"), "load_inplace": True}
        assert (await http.post(LOAD, json=body)).status_code == 200
        assert (await ask(http, "x")).json()["system_fingerprint"] != before
        gone = await http.post(UNLOAD, json={"lora_name": "x"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert (await ask(http, "x")).status_code == 422
        assert (await http.post(UNLOAD, json={"lora_name": "x"})).status_code == 404


async def test_what_cannot_be_loaded_is_refused_and_not_listed(tokenizer: Tokenizer, folder: Path) -> None:
    pool = answering(tokenizer)
    pool.refusals = {0: Unprocessable("the adapter 'x' cannot be used: it has the rank 99")}
    (folder / "bad").mkdir()
    cases = [
        ({"lora_name": "x", "lora_path": str(folder / "a0")}, "rank 99"),
        ({"lora_name": "x", "lora_path": str(folder / "bad")}, "adapter_config.json is missing"),
        ({"lora_name": "x", "lora_path": "/etc"}, "not below"),
        ({"lora_name": "x", "lora_path": f"{folder}/../.."}, "not below"),
        ({"lora_name": MODEL, "lora_path": str(folder / "a0"), "load_inplace": True}, "already been loaded"),
        ({"lora_name": "a\nb", "lora_path": str(folder / "a0")}, "`lora_name` must have printable"),
        ({"lora_name": "n" * 257, "lora_path": str(folder / "a0")}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
    ]
    async with served(pool, tokenizer, allow_runtime_lora=str(folder)) as http:
        for body, words in cases:
            refused = await http.post(LOAD, json=body)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text
        assert len((await http.get("/v1/models")).json()["data"]) == 1


@pytest.mark.parametrize("named", [True, False])
async def test_routes_are_closed_unless_the_server_allows_them(named: bool, tokenizer: Tokenizer, folder: Path) -> None:
    flags = {"lora_modules": f"one={folder / 'a0'}"} if named else {}
    async with served(answering(tokenizer), tokenizer, **flags) as http:
        bodies: dict[str, Any] = {LOAD: {"lora_name": "x", "lora_path": str(folder)}, UNLOAD: {"lora_name": "one"}}
        for path, body in (bodies | {DEFAULT: [{"id": 0, "scale": 1.0}]}).items():
            refused = await http.post(path, json=body)
            assert refused.status_code == 403 and "--allow-runtime-lora" in refused.text
