"""A server with a prefill worker: the answers of one worker, whichever process is killed."""

import os
import re
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

FLAGS = ("--kv-cache-gb", "0.25", "--remote-prefill-tokens", "300")
STORED = 512  # tokens: two files of 256


def prompt(seed: int) -> list[int]:
    return [10 + (seed * 131 + at * 7) % 1500 for at in range(700)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("prefill") / "log"
    with serving("demo", log, "--prefill-workers", "1", *FLAGS, held=True) as server:
        server.until(lambda stats: len(roles(stats)) == 2)
        folder = store_of(server)
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        yield server
    assert not folder.parent.exists(), "it is removed at the end"
    assert log.read_text().count("Traceback") == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The answers of a server with one worker."""
    with serving("demo", tmp_path_factory.mktemp("alone") / "log", *FLAGS[:2]) as server:
        return {seed: ask(server, seed) for seed in range(8)}


def roles(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The workers that are ready, by their roles."""
    return {worker["role"]: worker for worker in stats["workers"] if worker["ready"]}


def store_of(server: Server) -> Path:
    """Returns the folder that the workers share, as their command lines name it."""
    command = Path(f"/proc/{roles(server.stats())['prefill']['pid']}/cmdline").read_bytes().decode()
    return Path(re.findall(r"--kv-store=([^\0]+)", command)[0])


def ask(server: Server, seed: int) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt(seed), "max_tokens": 8, "temperature": seed % 2, "seed": seed}
    done = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status().json()
    return {"text": done["choices"][0]["text"], "usage": done["usage"]}


def attempts(server: Server) -> dict[str, int]:
    page = server.client.get("/metrics").text
    found = re.findall(r'sluice_remote_prefills_total\{[^}]*result="(\w+)"\} (\d+)', page)
    return {how: int(count) for how, count in found if int(count)}


def hits(server: Server) -> int:
    """How many files the worker that generates has read."""
    return int(roles(server.stats())["decode"]["kv_store"][0]["hits"])


def test_answers_and_usage_are_those_of_one_worker(server: Server, alone: dict[int, dict[str, Any]]) -> None:
    assert ask(server, 0) == alone[0] and ask(server, 1) == alone[1]
    assert alone[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    server.until(lambda stats: hits(server) == 4)
    assert attempts(server) == {"done": 2}
    again = ask(server, 0)
    assert again["text"] == alone[0]["text"] and again["usage"]["prompt_tokens_details"]["cached_tokens"] > STORED
    assert attempts(server) == {"done": 2}, "it is in the cache of the worker that generates"


@contextmanager
def held_in_prefill(server: Server, seed: int) -> Iterator[Future[dict[str, Any]]]:
    """Asks while the workers are held before they compute anything."""
    with ThreadPoolExecutor(1) as pool, server.hold.at(0):
        answer = pool.submit(ask, server, seed)
        server.until(lambda stats: roles(stats)["prefill"]["waiting"])
        yield answer


@pytest.mark.parametrize(("role", "seed"), [("prefill", 2), ("decode", 3)])
def test_killed_worker_costs_a_computation_only(
    server: Server, alone: dict[int, dict[str, Any]], role: str, seed: int
) -> None:
    victim = roles(server.stats())[role]
    if role == "prefill":
        with held_in_prefill(server, seed) as answer:
            os.kill(victim["pid"], signal.SIGKILL)
            server.until(lambda stats: "prefill" not in roles(stats))
            server.hold.release()
            assert answer.result(PATIENCE_S) == alone[seed]
        assert attempts(server)["lost"] == 1
        assert ask(server, seed + 2) == alone[seed + 2], "all prefill workers may be gone"
    else:
        os.kill(victim["pid"], signal.SIGKILL)
        assert ask(server, seed)["text"] == alone[seed]["text"]
    server.until(lambda stats: len(roles(stats)) == 2 and victim["pid"] != roles(stats)[role]["pid"])
    assert re.search(r"streams_lost_total\{.*\} 0", server.client.get("/metrics").text)


def test_client_that_leaves_ends_the_prefill(server: Server) -> None:
    body = {"model": "m", "prompt": prompt(98), "max_tokens": 8}
    with server.hold.at(0), pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
    server.until_idle()
    assert attempts(server)["ended"] == 1 and roles(server.stats())["decode"]["waiting"] == 0


def test_store_that_fails_costs_a_computation_only(server: Server, alone: dict[int, dict[str, Any]]) -> None:
    """The last test of this server: its store is left alone for ten seconds afterwards."""
    folder = store_of(server)
    folder.rename(folder.with_name("gone"))
    folder.touch()  # no folder can be there
    try:
        assert ask(server, 6)["text"] == alone[6]["text"] and ask(server, 7)["text"] == alone[7]["text"]
    finally:
        folder.unlink()
        folder.with_name("gone").rename(folder)
    server.until_idle()
