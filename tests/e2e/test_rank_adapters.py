"""Adapters of a server whose worker is several processes: the bytes of one process, also after the death of a rank."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.e2e.server import Server, read_events, serving

PROMPT, TOKENS = "A small boat waits", 40
NAMES = ("m", "one", "two")  # the base model, an adapter of the start, and one that is loaded at run time


@dataclass(frozen=True)
class Files:
    base: Path
    adapters: Path

    def flags(self) -> tuple[str, ...]:
        return (
            "--lora-modules", f"one={self.adapters / 'a0'}", "--allow-runtime-lora", str(self.adapters),
            "--max-cpu-loras", "2", "--dtype", "float32", "--kv-cache-gb", "0.05", "--speculation", "ngram",
        )  # fmt: skip


@pytest.fixture(scope="module")
def files(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Files:
    base, folder = checkpoints("llama"), tmp_path_factory.mktemp("adapters")
    for index in range(3):
        draw_adapter(base, folder / f"a{index}", index)
    return Files(base, folder)


def load(server: Server, files: Files, name: str, folder: str) -> None:
    body = {"lora_name": name, "lora_path": str(files.adapters / folder), "load_inplace": True}
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def ask(server: Server, model: str) -> list[int | None]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        events = read_events(client, {"model": model, **body})
    assert events.done is not None, events.error
    return list(events.ids)


def answers(server: Server, files: Files) -> dict[str, list[int | None]]:
    """Returns the ids of the base and of each adapter, asked at once, and of another adapter after these."""
    load(server, files, "two", "a1")
    with ThreadPoolExecutor(6) as pool:
        asked = [(name, pool.submit(ask, server, name)) for name in NAMES * 2]
        found = {name: future.result() for name, future in asked}
        assert all(future.result() == found[name] for name, future in asked)
    load(server, files, "three", "a2")  # there is room for two in memory, so another one is forgotten
    return found | {"three": ask(server, "three"), "one again": ask(server, "one")}


@pytest.fixture(scope="module")
def expected(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int | None]]:
    with serving(files.base, tmp_path_factory.mktemp("one") / "log", *files.flags()) as server:
        found = answers(server, files)
    assert len({tuple(ids) for ids in found.values()}) == 4 and found["one again"] == found["one"]
    return found


@pytest.mark.parametrize("several", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_several_processes_give_the_bytes_of_one(
    files: Files, expected: dict[str, list[int | None]], tmp_path: Path, several: str
) -> None:
    with serving(files.base, tmp_path / "log", *files.flags(), several, "2", held=True) as server:
        assert answers(server, files) == expected
        ranks = server.stats()["workers"][0]["ranks"]
        assert len(ranks) == 2
        with ThreadPoolExecutor(1) as pool, server.hold.at(TOKENS // 2):
            running = pool.submit(ask, server, "one")
            server.hold.wait()
            os.kill(ranks[1]["pid"], signal.SIGKILL)
            server.hold.release()
            assert running.result() == expected["one"], "the next worker loads the adapter again"
