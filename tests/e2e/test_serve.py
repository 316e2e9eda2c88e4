"""The server as its users see it: many streams, clients that leave, killed processes, refused starts."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e.server import ROOT, Events, Server, free_port, read_events
from tests.patience import PATIENCE_S


def test_demo_model_names_a_capital_in_events_and_openai_formats(demo: Server) -> None:
    prompt = "Q: What is the capital of France?\nA:"
    assert "Paris" in demo.events(prompt, 16).text
    client = openai.OpenAI(base_url=demo.url + "/v1", api_key="none")
    whole = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0)
    chunks = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0, stream=True)
    assert "Paris" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    client.close()


def test_64_streams_complete_and_free_all_pages(demo: Server) -> None:
    def one(i: int) -> Events:
        with httpx.Client(base_url=demo.url, timeout=PATIENCE_S) as client:
            return read_events(client, {"model": "m", "prompt": f"Count to {i}", "max_tokens": 16, "ignore_eos": True})

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    assert [len(answer.ids) for answer in answers] == [16] * 64
    alone = one(7)
    assert alone.ids == answers[7].ids
    stats = demo.until_idle()
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]


def test_seeded_text_under_load_is_unchanged(demo: Server) -> None:
    fields = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
    alone = demo.events("Once upon a time", 48, **fields)
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(_story, demo.url, seed) for seed in range(8)]
        again = demo.events("Once upon a time", 48, **fields)
        assert all(future.result().done for future in crowd)
    assert again == alone


def _story(url: str, seed: int) -> Events:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        return read_events(
            client, {"model": "m", "prompt": "A story:", "max_tokens": 48, "temperature": 1, "seed": seed}
        )


def test_frontends_load_no_torch(demo: Server) -> None:
    pids = {frontend["pid"] for frontend in demo.stats()["frontends"]}
    assert len(pids) == 2
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
        assert psutil.Process(pid).memory_info().rss < 250e6


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_frees_its_request(demo: Server, stream: bool) -> None:
    """The worker is held halfway through the answer until the request is freed."""
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    address = demo.url.removeprefix("http://").split(":")
    with demo.hold.at(8):
        with socket.create_connection((address[0], int(address[1])), PATIENCE_S) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
            client.sendall(b"content-length: %d\r\n\r\n%s" % (len(content), content))
            demo.until(lambda stats: stats["running"] == 1)
            if stream:
                assert client.recv(1 << 16)
        demo.until_idle()


def _once_upon_a_time(demo: Server) -> Events:
    return demo.events("Once upon a time", 60, ignore_eos=True)


def _over_a_socket(demo: Server) -> list[str]:
    """Returns the texts of two answers on one connection, the second behind the first."""
    body = {"model": "m", "input": "Once upon a time", "max_output_tokens": 60, "ignore_eos": True, "temperature": 0}
    texts: list[str] = []
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as sdk, sdk.responses.connect() as connection:
        for _ in range(2):
            connection.send_raw(json.dumps({"type": "response.create", "store": False, **body}))
            said = ""
            for event in connection:
                said += event.delta if event.type == "response.output_text.delta" else ""
                if event.type == "response.incomplete":
                    break
                assert event.type not in ("error", "response.failed", "response.completed"), event
            texts.append(said)
            assert said == event.response.output_text
            body["previous_response_id"] = event.response.id
    return texts


@pytest.mark.parametrize("answer", [_once_upon_a_time, _over_a_socket])
def test_worker_killed_is_replaced_and_streams_continue(demo: Server, answer: Callable[[Server], object]) -> None:
    undisturbed = answer(demo)
    before = demo.stats()["worker"]
    with ThreadPoolExecutor(1) as pool, demo.hold.at(30):
        stream = pool.submit(answer, demo)
        demo.hold.wait()
        os.kill(before["pid"], signal.SIGKILL)
        assert demo.client.get("/health").status_code == 200
        demo.hold.release()
        disturbed = stream.result(PATIENCE_S)
    assert disturbed == undisturbed
    after = demo.until(lambda stats: stats["worker"]["pid"] != before["pid"])["worker"]
    assert after["epoch"] > before["epoch"]
    demo.until_idle()


def test_frontend_killed_is_replaced(demo: Server) -> None:
    # waits until both frontends have registered with the new worker
    known = demo.until(lambda s: len(s["frontends"]) == 2)["frontends"]
    victim = known[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    demo.until(lambda s: victim not in {f["pid"] for f in s["frontends"]} and len(s["frontends"]) == 2)
    with httpx.Client(base_url=demo.url, timeout=PATIENCE_S) as client:
        assert read_events(client, {"model": "m", "prompt": "Hello", "max_tokens": 4}).done


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
def test_start_that_fails_states_reason_in_one_sentence(flags: list[str], code: int, words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "deploy.cli.main",
        "serve",
        "--port",
        str(free_port()),
        "--worker-metrics-port",
        "0",
    ]
    ended = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == code, ended.stdout + ended.stderr
    said = (ended.stdout + ended.stderr).strip().splitlines()
    assert any(words in line for line in said)
    assert "Traceback" not in ended.stdout + ended.stderr


def test_start_on_taken_port_names_the_port(demo: Server) -> None:
    port = demo.url.rpartition(":")[2]
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--port", port, "--worker-metrics-port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode != 0 and f"port {port}" in ended.stdout + ended.stderr


def test_more_answers_than_the_worker_can_hold_are_refused_by_name(demo: Server) -> None:
    """The frontend knows how many sequences the worker can run and queue, and refuses the request by itself."""
    body = {"prompt": ["a"] * 2048, "n": 16, "max_tokens": 1}
    answer = demo.client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "n")
    assert "32768 answers" in answer.text and f"room for {64 + 1024}" in answer.text
