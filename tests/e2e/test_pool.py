"""Two workers behind two frontends: under load, one worker is killed, or drains after SIGTERM."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

STREAMS, TOKENS = 8, 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    flags = ("--workers", "2", "--frontends", "2", "--kv-cache-gb", "0.25")
    with serving("demo", tmp_path_factory.mktemp("pool") / "log", *flags, held=True) as server:
        server.until(lambda stats: len(ready(stats)) == len(stats["frontends"]) == 2 and all_ready(server))
        yield server


def all_ready(server: Server) -> bool:
    """Whether both frontends are ready. A new connection reaches either of them."""
    return all(httpx.get(f"{server.url}/ready").status_code == 200 for _ in range(16))


def ready(stats: dict[str, Any]) -> list[dict[str, Any]]:
    return [worker for worker in stats["workers"] if worker["ready"]]


def text(server: Server, i: int) -> str:
    """Streams one answer through the SDK: greedy for even `i`, sampled for odd `i`."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(
            model="m", prompt=f"Story {i}: once", max_tokens=TOKENS, temperature=i % 2, seed=i, stream=True,
            extra_body={"ignore_eos": True, "mirostat": 2 * (i == 1), "dry_multiplier": float(i == 3)},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@contextmanager
def load(server: Server) -> Iterator[list[Future[str]]]:
    """Runs streams on both workers, held halfway until the block ends or releases them."""
    with ThreadPoolExecutor(STREAMS) as pool, server.hold.at(TOKENS // 2):
        texts = [pool.submit(text, server, i) for i in range(STREAMS)]
        server.until(lambda stats: all(worker["running"] for worker in stats["workers"]))
        yield texts


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    with load(server) as texts:
        server.hold.release()
        return [future.result(PATIENCE_S) for future in texts]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_streams_with_killed_or_drained_worker_are_unchanged(
    server: Server, undisturbed: list[str], signum: signal.Signals
) -> None:
    with load(server) as texts:
        victim = ready(server.stats())[0]
        server.hold.wait()
        os.kill(victim["pid"], signum)
        server.hold.release()
        assert [future.result(PATIENCE_S) for future in texts] == undisturbed
    server.until(lambda stats: victim["pid"] not in [w["pid"] for w in stats["workers"]] and len(ready(stats)) == 2)
    stats = server.until_idle()
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
    assert re.search(r"streams_lost_total\{.*\} 0", server.client.get("/metrics").text)
