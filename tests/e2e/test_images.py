"""A server that sees images: the official SDKs, two frontends, a worker that is killed, receipts."""

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.server import Server, serving
from tests.images import drawn, seeing_checkpoint

TOKENS = 40


def data(seed: int) -> str:
    file = io.BytesIO()
    drawn(50, 30, seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def asking(seed: int, question: str = "What is this?") -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(seed)}"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


@pytest.fixture(scope="module", params=["idefics3", "gemma3", "qwen3_5", "qwen3_vl"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("seeing")
    folder = seeing_checkpoint(request.param, root / "model")
    flags = ("--frontends", "2", "--dtype", "float32", "--kv-cache-gb", "0.05")
    with serving(folder, root / "log", *flags, held=True) as server:
        server.until(lambda stats: len(stats["frontends"]) == 2)
        yield server


def answer(server: Server, seed: int, **more: Any) -> Any:
    body = {"model": "m", "messages": asking(seed), "max_tokens": TOKENS, "seed": 1, "ignore_eos": True, **more}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "choices" in found, found
    return found


def test_both_sdks_see_the_same_image(seeing: Server) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none") as sdk:
        chat = sdk.chat.completions.create(model="m", messages=asking(0), max_tokens=9, temperature=0)  # type: ignore[arg-type]
        text = chat.choices[0].message.content
        assert chat.usage is not None
        with sdk.chat.completions.create(
            model="m", messages=asking(0), max_tokens=9, temperature=0, stream=True
        ) as stream:  # type: ignore[call-overload]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
    source = {"type": "base64", "media_type": "image/png", "data": data(0)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    said: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=seeing.url, api_key="none") as claude:
        message = claude.messages.create(model="m", messages=said, max_tokens=9, extra_body={"temperature": 0})
        assert message.content[0].type == "text" and message.content[0].text == text
        counted = claude.messages.count_tokens(model="m", messages=said)
    assert counted.input_tokens == message.usage.input_tokens == chat.usage.prompt_tokens


def test_answers_with_images_survive_the_worker_and_are_receipted(seeing: Server) -> None:
    expected = [answer(seeing, seed)["choices"][0]["message"]["content"] for seed in (0, 1)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(1) as pool, seeing.hold.at(TOKENS // 2):
        running = pool.submit(answer, seeing, 1)
        seeing.hold.wait()
        os.kill(seeing.stats()["workers"][0]["pid"], signal.SIGKILL)
        seeing.hold.release()
        assert running.result()["choices"][0]["message"]["content"] == expected[1]
    seeing.until_idle()
    choice = answer(seeing, 0, receipt=True)["choices"][0]
    asked = {"model": "m", "messages": asking(0), "max_tokens": TOKENS, "seed": 1, "ignore_eos": True, "receipt": True}
    verify = f"{seeing.url}/v1/receipts/verify"
    same = httpx.post(verify, json={"receipt": choice["receipt"], "request": asked}, timeout=60).json()
    assert same["identical"], same
    other = httpx.post(
        verify, json={"receipt": choice["receipt"], "request": asked | {"messages": asking(1)}}, timeout=60
    )
    assert not other.json()["identical"] and "prompt_sha256" in other.text


def test_hostile_images_cost_nobody_else_anything(seeing: Server) -> None:
    expected = answer(seeing, 3)["choices"]
    bad = base64.b64encode(b"\x89PNG\r\n\x1a\n" + os.urandom(2000)).decode()

    def hostile(_: int) -> int:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bad}"}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}], "max_tokens": 3}
        return httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(6) as pool:
        codes = [pool.submit(hostile, number) for number in range(12)]
        assert all(each.result()["choices"] == expected for each in [pool.submit(answer, seeing, 3) for _ in range(4)])
        assert {code.result() for code in codes} == {400}
    assert Path(f"/proc/{seeing.stats()['workers'][0]['pid']}").exists()
