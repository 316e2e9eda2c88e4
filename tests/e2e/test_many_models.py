"""Three models behind two frontends, with room for two at a time: loads, evictions, failures, and processes killed."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import Checkpoints
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

KINDS = {"one": "llama", "two": "qwen3", "three": "gemma3"}
TOKENS = 12


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("many")
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"model_type": "nonsense"}')
    (damaged / "model.safetensors").write_bytes(b"\xff" * 64)
    lines = [
        f'[models.{name}]\nmodel = "{checkpoints(kind)}"\naliases = ["{name}-again"]' for name, kind in KINDS.items()
    ]
    lines.append('[models.huge]\nmodel = "demo"\nflags = { kv-cache-gb = 4000 }')
    lines.append(f'[models.damaged]\nmodel = "{damaged}"')
    table = folder / "models.toml"
    table.write_text("\n".join(lines))
    flags = ("--models", str(table), "--max-loaded-models", "2", "--frontends", "2", "--kv-cache-gb", "0.02")
    flags += ("--device", "cpu", "--dtype", "float32", "--load-wait", str(PATIENCE_S))
    with serving(None, folder / "log", *flags, name="") as server:
        yield server


def complete(server: Server, model: str | None) -> httpx.Response:
    """Sends a completion on a new connection, which may reach either frontend."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def text(server: Server, model: str) -> str:
    answer = complete(server, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model.removesuffix("-again")
    return str(answer.json()["choices"][0]["text"])


def states(server: Server) -> dict[str, str]:
    listed = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return {model["id"]: model["status"]["value"] for model in listed if not model["id"].endswith("-again")}


def until_state(server: Server, name: str, state: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while states(server)[name] != state:
        assert time.monotonic() < deadline, states(server)
        time.sleep(0.05)


def order(server: Server, action: str, model: str) -> httpx.Response:
    return httpx.post(f"{server.url}/models/{action}", json={"model": model}, timeout=PATIENCE_S)


def children(server: Server) -> dict[int, str]:
    """Returns pid → command line of the launcher's worker and frontend processes."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if f"--parent={server.process.pid}" in words:
                found[int(folder.name)] = " ".join(words)
    return found


def kill(server: Server, pattern: str) -> int:
    """Kills one process whose command line matches `pattern`. Returns how many processes matched."""
    pids = [pid for pid, words in children(server).items() if re.search(pattern, words)]
    if pids:
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
    return len(pids)


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, str]:
    """The answer of each model; the first request loads the model."""
    assert set(states(server).values()) == {"unloaded"}
    found = {name: text(server, name) for name in KINDS}
    assert len(set(found.values())) == 3
    return found


def test_at_most_two_are_loaded_and_the_oldest_goes(server: Server, texts: dict[str, str]) -> None:
    text(server, "two")
    text(server, "three-again")
    assert text(server, "one") == texts["one"], "loaded again, it computes the same"
    now = states(server)
    assert [now[name] for name in ("one", "three")] == ["loaded", "loaded"]
    until_state(server, "two", "unloaded")


def test_bad_models_are_told_and_others_do_not_notice(server: Server, texts: dict[str, str]) -> None:
    huge, damaged, absent = (complete(server, name) for name in ("huge", "damaged", "absent"))
    assert (huge.status_code, damaged.status_code, absent.status_code) == (503, 503, 422)
    assert "it needs 4000." in huge.json()["error"]["message"]
    assert "damaged" in damaged.json()["error"]["message"]
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in (huge, damaged))
    chat = {"model": "absent", "messages": [{"role": "user", "content": "x"}]}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 404
    now = states(server)
    assert (now["huge"], now["damaged"]) == ("failed", "failed")
    assert text(server, "one") == texts["one"]


def test_routes_load_and_unload(server: Server, texts: dict[str, str]) -> None:
    text(server, "one")
    assert order(server, "unload", "one-again").json() == {"success": True}
    until_state(server, "one", "unloaded")
    assert order(server, "unload", "one").status_code == 400
    assert order(server, "load", "one").json() == {"success": True}
    until_state(server, "one", "loaded")
    assert order(server, "load", "one").status_code == 400
    assert order(server, "load", "absent").status_code == 404
    assert text(server, "one") == texts["one"]


def test_ollama_keeps_loads_and_lists(server: Server, texts: dict[str, str]) -> None:
    """`keep_alive` 0 unloads the model after the answer, and an empty prompt loads the model.

    /api/ps lists the loaded models, /api/tags all models.
    """

    def generate(**fields: Any) -> httpx.Response:
        return httpx.post(
            f"{server.url}/api/generate", json={"model": "one", "stream": False, **fields}, timeout=PATIENCE_S
        )

    def running() -> dict[str, Any]:
        return {one["name"]: one for one in httpx.get(f"{server.url}/api/ps").json()["models"]}

    assert generate(keep_alive="10m").json()["done_reason"] == "load"
    seen: list[dict[str, Any]] = []  # one frontend may learn of the change later than the other
    until(lambda: seen.extend(one for name, one in running().items() if name == "one:latest") or seen)
    shown = seen[0]
    assert shown["size"] > 0.02 * (1 << 30)
    assert shown["expires_at"].startswith("20")
    listed = {one["name"] for one in httpx.get(f"{server.url}/api/tags").json()["models"]}
    assert listed == {f"{name}:latest" for name in (*KINDS, "huge", "damaged")}
    refused = generate(keep_alive="soon")
    assert (refused.status_code, "keep_alive" in refused.json()["error"]) == (400, True)
    generate(keep_alive=0)
    until_state(server, "one", "unloaded")
    until(lambda: "one:latest" not in running())


def test_a_running_request_is_finished_before_its_model_goes(server: Server, texts: dict[str, str]) -> None:
    body = {"model": "one", "prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    text(server, "one")
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        order(server, "unload", "one")
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    until_state(server, "one", "unloaded")


@pytest.mark.parametrize("pattern", ["served.model.name=two", r" frontend "])
def test_kill_while_a_model_loads_heals(server: Server, texts: dict[str, str], pattern: str) -> None:
    for name in ("one", "three"):
        text(server, name)
    until_state(server, "two", "unloaded")
    assert order(server, "load", "two").status_code == 200
    deadline = time.monotonic() + PATIENCE_S
    while not kill(server, pattern):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    until(lambda: text(server, "two") == texts["two"])


def until(true: Any) -> None:
    """Waits until `true()`. Ignores broken connections, because a frontend may be killed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(httpx.TransportError):
            if true():
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_small_soak_with_kills(server: Server, texts: dict[str, str]) -> None:
    """Every answer is the text of its model, or a refusal that asks to try again; no answer is lost."""
    rng = random.Random(35)
    asked = [rng.choice([*KINDS]) for _ in range(16)]

    def ask(name: str) -> str:
        with suppress(httpx.TransportError):
            answer = complete(server, name)
            if answer.status_code == 503:
                assert "Retry-After" in answer.headers
                return "refused"
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, texts[name]), answer.text
            return "answered"
        return "cut"

    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(ask, name) for name in asked]
        for pattern in (" worker ", " frontend ", " worker "):
            time.sleep(2)
            kill(server, pattern)
        outcomes = [future.result() for future in pending]
    assert outcomes.count("answered") >= len(asked) // 2, outcomes
    assert outcomes.count("cut") <= 4, "one kill of a frontend cuts at most the connections that it had"
    for name in KINDS:  # requests to a worker whose death is not noticed yet are refused
        until(lambda name=name: ask(name) == "answered")
