"""The server as its users meet it: many at once, more than it can take, gone in the middle, killed and back."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.server import ROOT, Events, Server, free_port, read_events, serving


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving("demo", tmp_path_factory.mktemp("demo") / "log", "--frontends", "2") as server:
        server.until(lambda stats: len(stats["frontends"]) == 2)
        yield server


def test_the_demo_model_knows_a_capital_in_both_dialects(demo: Server) -> None:
    prompt = "Q: What is the capital of France?\nA:"
    assert "Paris" in demo.events(prompt, 16).text
    client = openai.OpenAI(base_url=demo.url + "/v1", api_key="none")
    whole = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0)
    chunks = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0, stream=True)
    assert "Paris" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    client.close()


def test_64_streams_complete_and_leave_nothing(demo: Server) -> None:
    def one(i: int) -> Events:
        with httpx.Client(base_url=demo.url, timeout=60) as client:
            return read_events(client, {"model": "m", "prompt": f"Count to {i}", "max_tokens": 40, "ignore_eos": True})

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    assert [len(answer.ids) for answer in answers] == [40] * 64
    alone = one(7)
    assert alone.ids == answers[7].ids
    stats = demo.until_idle()
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]


def test_seeded_text_is_the_same_under_load(demo: Server) -> None:
    fields = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
    alone = demo.events("Once upon a time", 48, **fields)
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(_story, demo.url, seed) for seed in range(8)]
        again = demo.events("Once upon a time", 48, **fields)
        assert all(future.result().done for future in crowd)
    assert again == alone


def _story(url: str, seed: int) -> Events:

    with httpx.Client(base_url=url, timeout=60) as client:
        return read_events(
            client, {"model": "m", "prompt": "A story:", "max_tokens": 60, "temperature": 1, "seed": seed}
        )


def test_both_frontends_serve_and_hold_no_torch(demo: Server) -> None:
    pids = {frontend["pid"] for frontend in demo.stats()["frontends"]}
    assert len(pids) == 2
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
        assert psutil.Process(pid).memory_info().rss < 250e6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(demo: Server, stream: bool) -> None:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=demo.url, timeout=0.7) as client, pytest.raises(httpx.TimeoutException):
        _leave(client, body)
    demo.until_idle()


def _leave(client: httpx.Client, body: dict[str, Any]) -> None:
    """Begin to read, and go away in the middle (a whole answer is not there in time)."""
    with client.stream("POST", "/v1/completions", json=body):
        time.sleep(0.7)
        raise httpx.ReadTimeout("enough")


def test_a_killed_worker_is_replaced_and_streams_go_on(demo: Server) -> None:
    undisturbed = demo.events("Once upon a time", 1500, ignore_eos=True)
    before = demo.stats()["worker"]
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(demo.events, "Once upon a time", 1500, ignore_eos=True)
        demo.until(lambda stats: stats["running"] > 0)
        time.sleep(0.2)
        os.kill(before["pid"], signal.SIGKILL)
        assert demo.client.get("/health").status_code == 200
        disturbed = stream.result(timeout=60)
    assert disturbed == undisturbed
    after = demo.until(lambda stats: stats["worker"]["pid"] != before["pid"])["worker"]
    assert after["epoch"] > before["epoch"]
    demo.until_idle()


def test_a_killed_frontend_is_replaced(demo: Server) -> None:
    known = demo.until(lambda s: len(s["frontends"]) == 2)["frontends"]  # a new worker hears of them anew
    victim = known[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    demo.until(lambda s: victim not in {f["pid"] for f in s["frontends"]} and len(s["frontends"]) == 2)
    with httpx.Client(base_url=demo.url, timeout=60) as client:
        assert read_events(client, {"model": "m", "prompt": "Hello", "max_tokens": 4}).done


def test_more_than_it_can_take_is_refused_and_the_rest_is_whole(tmp_path: Path) -> None:
    flags = ["--max-waiting-requests", "4", "--max-batch-size", "2"]

    def one(server: Server) -> Events:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            return read_events(
                client, {"model": "m", "prompt": "Tell me a story", "max_tokens": 60, "ignore_eos": True}
            )

    with serving("demo", tmp_path / "log", *flags) as server:
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(one, [server] * 40))
        assert {answer.status for answer in answers} == {200, 503}
        texts = {answer.text for answer in answers if answer.status == 200}
        assert len(texts) == 1 and all(len(a.ids) == 60 for a in answers if a.status == 200)
        server.until_idle()


def test_sigterm_finishes_what_runs_and_leaves_no_process(tmp_path: Path) -> None:
    with serving("demo", tmp_path / "log") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(server.events, "Once upon a time", 1500, ignore_eos=True)
            server.until(lambda stats: stats["running"] > 0)
            server.process.send_signal(signal.SIGTERM)
            events = stream.result(timeout=40)
        assert events.done is not None and len(events.ids) == 1500
        server.process.wait(timeout=40)
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model", "/no/such/folder"], 3, "/no/such/folder"),
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--page-size", "many"], 2, "--page-size"),
        (["--max-seq-len", "999999"], 2, "--max-seq-len"),
        (["--device", "cuda"], 2, "--device cuda"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence(flags: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "deploy.cli", "serve", "--port", str(free_port()), "--worker-metrics-port", "0"]
    ended = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stdout + ended.stderr
    said = (ended.stdout + ended.stderr).strip().splitlines()
    assert any(words in line for line in said)
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_taken_port_is_said(demo: Server) -> None:
    port = demo.url.rpartition(":")[2]
    command = [sys.executable, "-m", "deploy.cli", "serve", "--port", port, "--worker-metrics-port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and f"port {port}" in ended.stdout + ended.stderr
