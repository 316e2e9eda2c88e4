"""A server whose worker is several processes gives the bytes of one process, and survives the death of any of them."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import Checkpoints
from tests.e2e.broken_rank import STREAM, WEIGHTS
from tests.e2e.server import Server, free_port, serving
from tests.patience import PATIENCE_S

PROMPT, TOKENS, STREAMS = "A small boat waits", 60, 4
FLAGS = ("--dtype", "float32", "--kv-cache-gb", "0.05", "--speculation", "ngram", "--stall-timeout", "5")
METRICS_PORT = free_port()


def answers(server: Server) -> list[list[int]]:
    def one(seed: int) -> list[int]:
        """Returns the ids of one answer. Asks again after a 503: the worker died before it admitted the request."""
        asked = {"temperature": 0.8, "seed": seed, "ignore_eos": True}
        while (found := server.events(PROMPT, TOKENS, **asked)).status == 503:
            time.sleep(0.2)
        return found.ids

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(one, range(STREAMS)))


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with serving(checkpoints("llama"), tmp_path_factory.mktemp("one") / "log", *FLAGS) as server:
        assert server.stats()["workers"][0]["ranks"] == []
        return answers(server)


@pytest.fixture(scope="module")
def ranks(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with serving(checkpoints("llama"), log, *FLAGS, "--tensor-parallel-size", "2", "--worker-metrics-port",
                 str(METRICS_PORT), held=True) as server:  # fmt: skip
        yield server


def pids(server: Server) -> list[int]:
    stats = server.until(lambda stats: stats["workers"][0]["ready"] and len(stats["workers"][0]["ranks"]) == 2)
    return [rank["pid"] for rank in stats["workers"][0]["ranks"]]


def test_two_processes_give_the_bytes_of_one(ranks: Server, expected: list[list[int]]) -> None:
    assert answers(ranks) == expected
    assert os.getppid() not in pids(ranks)


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_streams_go_on_when_a_rank_dies_or_stops(
    ranks: Server, expected: list[list[int]], rank: int, number: signal.Signals
) -> None:
    before = pids(ranks)
    with ThreadPoolExecutor(1) as pool, ranks.hold.at(TOKENS // 2):
        running = pool.submit(answers, ranks)
        ranks.hold.wait()
        os.kill(before[rank], number)
        ranks.hold.release()
        assert running.result() == expected
    after = pids(ranks)
    assert not {*before} & {*after}
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()], "no process of a dead worker is left"


@pytest.mark.parametrize("where", [STREAM, WEIGHTS])
def test_rank_that_differs_is_named_and_ends_its_worker(ranks: Server, expected: list[list[int]], where: str) -> None:
    """No token of a step with a wrong rank is sent. A rank with different weights is found before its worker serves."""
    before, counted = pids(ranks), differed(ranks)
    ranks.hold.flip.write_text(where)
    if where == WEIGHTS:
        os.kill(before[0], signal.SIGKILL)
    assert answers(ranks) == expected
    assert not {*before} & {*pids(ranks)} and not ranks.hold.flip.exists()
    words = {STREAM: "rank 1 has another residual stream", WEIGHTS: "rank 1 has other weights in layers.1."}
    assert words[where] in ranks.log.read_text()
    assert differed(ranks) == {"0": counted["0"], "1": counted["1"] + 1}


@pytest.mark.parametrize("several", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_later_starts_read_the_packed_weights_of_every_rank(
    checkpoints: Checkpoints, tmp_path: Path, expected: list[list[int]], several: str
) -> None:
    """A rank that packs its weights again would write its file again."""
    cache = tmp_path / "cache"
    flags, seen = (*FLAGS, several, "2", "--weights-cache", str(cache)), list[dict[str, int]]()
    for start in range(2):
        with serving(checkpoints("llama"), tmp_path / f"log{start}", *flags) as server:
            server.until(lambda _: len(list(cache.glob("*.safetensors"))) == 2)
            assert answers(server) == expected
        seen.append({file.name: file.stat().st_mtime_ns for file in cache.iterdir()})
        assert ("packed weights were read" in (tmp_path / f"log{start}").read_text()) == bool(start)
    assert seen[0] == seen[1]


def differed(server: Server) -> dict[str, float]:
    """Returns how often each rank had wrong numbers, according to the metrics."""
    ready = server.until(lambda stats: stats["workers"][0]["ready"])
    assert ready
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=PATIENCE_S).text
    return {rank: float(value) for rank, value in re.findall(r'ranks_differed_total\{.*rank="(\d)".*\} (.+)', text)}
