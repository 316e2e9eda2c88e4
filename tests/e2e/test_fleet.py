"""Two workers behind two frontends, as their users meet them: one is killed, or asked to go, under load."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server, serving

STREAMS, TOKENS = 8, 800


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    flags = ("--workers", "2", "--frontends", "2", "--kv-cache-gb", "0.25")
    with serving("demo", tmp_path_factory.mktemp("fleet") / "log", *flags) as server:
        server.until(lambda stats: len(ready(stats)) == len(stats["frontends"]) == 2 and everywhere(server))
        yield server


def everywhere(server: Server) -> bool:
    """Whether both frontends are ready: each new connection finds one of them."""
    return all(httpx.get(f"{server.url}/ready").status_code == 200 for _ in range(16))


def ready(stats: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for worker in stats["workers"] if worker["ready"]]


def text(server: Server, i: int) -> str:
    """One stream of the SDK: half of them greedy, half sampled."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(
            model="m", prompt=f"Story {i}: once", max_tokens=TOKENS, temperature=i % 2, seed=i, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@contextmanager
def load(server: Server) -> Iterator[list[Future[str]]]:
    """Streams that run at both workers."""
    with ThreadPoolExecutor(STREAMS) as pool:
        texts = [pool.submit(text, server, i) for i in range(STREAMS)]
        server.until(lambda stats: all(worker["running"] for worker in stats["workers"]))
        yield texts


@pytest.fixture(scope="module")
def undisturbed(demo: Server) -> list[str]:
    with load(demo) as texts:
        return [future.result(60) for future in texts]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_notices_that_a_worker_goes(demo: Server, undisturbed: list[str], signum: signal.Signals) -> None:
    with load(demo) as texts:
        victim = ready(demo.stats())[0]
        os.kill(victim["pid"], signum)
        assert [future.result(60) for future in texts] == undisturbed
    demo.until(lambda stats: victim["pid"] not in [w["pid"] for w in stats["workers"]] and len(ready(stats)) == 2)
    stats = demo.until_idle()
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
    assert "streams_lost_total 0" in demo.client.get("/metrics").text
