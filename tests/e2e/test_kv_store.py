"""A server with a K/V store: what a client sees of it after a `kill -9` of the worker, and after a reset."""

import os
import signal
import time
from pathlib import Path

import httpx

from tests.e2e.server import Server, free_port, serving

PROMPT = [10 + at * 7 % 1500 for at in range(700)]
STORED = 512  # tokens: two files of 256


def ask(server: Server) -> tuple[str, int]:
    """Returns the answer, and how many tokens of the prompt were found."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    done = server.client.post("/v1/completions", json=body).raise_for_status().json()
    return done["choices"][0]["text"], done["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefix_outlives_its_worker_and_a_reset_ends_it(tmp_path: Path) -> None:
    folder, port = tmp_path / "kv", free_port()
    flags = ("--kv-store", str(folder), "--kv-store-gb", "0.5", "--kv-store-fetch", "always", "--api-key", "k")
    with serving("demo", tmp_path / "log", *flags, "--worker-metrics-port", str(port)) as server:
        server.headers["Authorization"] = server.client.headers["Authorization"] = "Bearer k"
        text, cached = ask(server)
        assert cached == 0
        server.until(lambda stats: stats["workers"][0]["kv_store"][0]["written"] == 2)
        os.kill((before := server.stats()["workers"][0])["pid"], signal.SIGKILL)
        server.until(lambda stats: stats["workers"][0]["epoch"] > before["epoch"] and stats["workers"][0]["ready"])
        assert ask(server) == (text, STORED)
        tier = server.until(lambda stats: stats["workers"][0]["kv_store"][0]["hits"])["workers"][0]["kv_store"][0]
        assert (tier["hits"], tier["tokens"], tier["usable"]) == (2, STORED, True) and "folder" not in tier
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert f'sluice_kv_store_hit_tokens_total{{model_name="m"}} {STORED}.0' in page
        assert not [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]
        assert server.client.post("/reset_prefix_cache").json() == {"workers": 1}
        os.kill((before := server.stats()["workers"][0])["pid"], signal.SIGKILL)
        server.until(lambda stats: stats["workers"][0]["epoch"] > before["epoch"] and stats["workers"][0]["ready"])
        assert ask(server) == (text, 0)


def test_cache_control_keeps_the_files_of_its_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    marked = {"type": "text", "text": "go on " * 400, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [marked]}]}
    with serving("demo", tmp_path / "log", "--kv-store", str(folder), "--kv-store-gb", "0.5") as server:
        kept_until = time.time() + 3600
        server.client.post("/v1/messages", json=body).raise_for_status()
        server.until(lambda stats: stats["workers"][0]["kv_store"][0]["written"] > 1)
        times = [path.stat().st_mtime for path in folder.glob("*/*") if path.is_file()]
        assert sum(used >= kept_until for used in times) > 1
