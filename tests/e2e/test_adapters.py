"""A server with adapters: two frontends, one worker that is killed, and adapters that come and go under load."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from deploy.offline.llm import LLM
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.e2e.server import Events, Server, read_events, serving

PROMPT, TOKENS = "A small boat waits", 80


@dataclass(frozen=True)
class Adapters:
    server: Server
    base: Path
    folder: Path  # the folder of the adapters a0 to a3

    def ask(self, model: str, tokens: int = TOKENS) -> Events:
        with httpx.Client(base_url=self.server.url, timeout=60) as client:  # a new connection may reach any frontend
            body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.8, "seed": 3, "ignore_eos": True}
            return read_events(client, {"model": model, **body})

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=60)

    def load(self, name: str, folder: str, **more: object) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(self.folder / folder), **more)

    def kill_worker(self) -> None:
        os.kill(self.server.stats()["workers"][0]["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def adapters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    base, folder = checkpoints("qwen3"), tmp_path_factory.mktemp("adapters")
    for index in range(4):
        draw_adapter(base, folder / f"a{index}", index)
    flags = ("--frontends", "2", "--lora-modules", f"one={folder / 'a0'}", "--allow-runtime-lora", str(folder))
    flags += ("--max-cpu-loras", "2", "--max-loras", "2", "--dtype", "float32", "--metrics-prefix", "vllm:")
    with serving(base, folder / "log", *flags, held=True) as server:
        server.until(lambda stats: len(stats["frontends"]) == 2)
        yield Adapters(server, base, folder)


def test_adapters_come_and_go_under_load_and_all_answers_stay_the_same(adapters: Adapters) -> None:
    expected = {"m": adapters.ask("m"), "one": adapters.ask("one")}
    assert all(len(events.ids) == TOKENS for events in expected.values())
    with ThreadPoolExecutor(6) as pool:
        running = [(name, pool.submit(adapters.ask, name)) for name in ("m", "one") * 6]
        for index in (1, 2, 3, 1):
            assert adapters.load("x", f"a{index}", load_inplace=True).status_code == 200
            assert len({tuple(adapters.ask("x", 12).ids) for _ in range(4)}) == 1, "all frontends know it at once"
        assert adapters.post("/v1/unload_lora_adapter", lora_name="x").status_code == 200
        assert {adapters.ask("x", 3).status for _ in range(4)} == {422}
        for name, future in running:
            assert future.result().ids == expected[name].ids, name
    for scales, name in (([{"id": 0, "scale": 1.0}], "one"), ([], "m")):
        assert httpx.post(f"{adapters.server.url}/lora-adapters", json=scales).json() == {"success": True}
        assert all(adapters.ask("m").ids == expected[name].ids for _ in range(4)), "all frontends have the default"
    adapters.server.until_idle()


def test_adapter_whose_products_overflow_is_refused(adapters: Adapters) -> None:
    """Its numbers are finite, but the logits are not: each answer was token 0 again and again."""
    draw_adapter(adapters.base, adapters.folder / "huge", 9, size=1e30)
    refused = adapters.load("huge", "huge")
    assert refused.status_code == 400 and "the logits are not finite" in refused.text
    assert len(adapters.ask("m").ids) == TOKENS


def test_stream_survives_its_worker_and_ends_if_its_adapter_is_another_one_then(adapters: Adapters) -> None:
    shutil.copytree(adapters.folder / "a1", adapters.folder / "changing")
    assert adapters.load("c", "changing").status_code == 200
    expected = {name: adapters.ask(name).ids for name in ("one", "c")}
    server = adapters.server
    with ThreadPoolExecutor(2) as pool, server.hold.at(1, 0.03):
        running = {name: pool.submit(adapters.ask, name) for name in expected}
        # waits, because only admitted requests survive the death of their worker
        server.until(lambda stats: stats["running"] == 2)
        with server.hold.at(TOKENS // 2):
            server.hold.wait()
            shutil.copy(adapters.folder / "a2/adapter_model.safetensors", adapters.folder / "changing")
            adapters.kill_worker()
        survived, ended = (running[name].result() for name in ("one", "c"))
    assert survived.ids == expected["one"] and survived.done is not None
    assert ended.error is not None and "have changed since it was loaded" in ended.error
    ids = [id for id in ended.ids if id is not None]  # text that was held back arrives without an id
    assert ids == expected["c"][: len(ids)], "no token of other weights follows"
    assert adapters.load("c", "changing", load_inplace=True).status_code == 200
    assert adapters.ask("c").ids not in expected.values()


def test_python_without_a_server_gives_the_same_answers(adapters: Adapters) -> None:
    options = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 20, "receipt": True}
    receipt = adapters.post("/v1/completions", **body).json()["choices"][0]["receipt"]
    named = f"one={adapters.folder / 'a0'} x={adapters.folder / 'a1'}"
    with LLM(adapters.base, lora_modules=named, dtype="float32", threads=1) as llm:
        for name, adapter in (("m", None), ("one", "one")):
            [answer] = llm.complete(PROMPT, adapter=adapter, **options)
            assert list(answer.ids) == adapters.ask(name, 40).ids
        streams = [llm.generate([PROMPT] * 2, adapter=each, stream=True, **options) for each in (None, "one", "x")]
        texts = [sorted(stream) for stream in streams]
        assert texts[0] != texts[1] != texts[2] != texts[0], "each runs with its own weights"
        verdict = llm.verify(receipt, body)
        assert verdict["identical"] and verdict["fingerprint_matches"]


def test_official_sdk_finds_adapters_and_their_receipts_hold(adapters: Adapters) -> None:
    with openai.OpenAI(base_url=f"{adapters.server.url}/v1", api_key="none") as sdk:
        assert {"m", "one"} <= {model.id for model in sdk.models.list()}
        chat = sdk.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=9, extra_body={"receipt": True}
        )
        assert chat.model == "one"
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 20, "receipt": True}
    receipt = adapters.post("/v1/completions", **body).json()["choices"][0]["receipt"]
    verdict = adapters.post("/v1/receipts/verify", receipt=receipt, request=body).json()
    assert verdict["identical"] and verdict["fingerprint_matches"]
    other = adapters.post("/v1/receipts/verify", receipt={**receipt, "model": "m"}, request={**body, "model": "m"})
    assert other.json()["error"]["code"] == "fingerprint_mismatch"
