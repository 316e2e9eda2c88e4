"""A batch whose worker and frontends are killed at random lines: its output is that of an undisturbed one."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server, serving

LINES, TOKENS = 240, 40
KILLED = (("frontend",), ("worker",), ("frontend", "worker"))


def request(id: int) -> dict[str, Any]:
    body = {
        "model": "m", "prompt": [20 + id % 200, 30, id // 200 + 40], "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": 1, "seed": id,
    }  # fmt: skip
    return {"custom_id": f"id-{id}", "method": "POST", "url": "/v1/completions", "body": body}


def asked(server: Server, method: str, path: str, **more: Any) -> httpx.Response:
    """Asks once more whenever a killed frontend took the connection along."""
    while True:
        try:
            answer = httpx.request(method, f"{server.url}/v1/{path}", timeout=60, **more)
        except httpx.TransportError:
            continue
        if answer.status_code != 503:
            assert answer.status_code == 200, answer.text
            return answer


def counted(server: Server, disturb: Callable[[int], None]) -> tuple[dict[str, Any], list[Any]]:
    """Runs a batch. Returns it and its output. disturb: gets the number of lines with an outcome, again and again"""
    data = "".join(json.dumps(request(id)) + "\n" for id in range(LINES))
    file = asked(server, "POST", "files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"}).json()
    made = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    id = asked(server, "POST", "batches", json=made).json()["id"]
    while (batch := asked(server, "GET", f"batches/{id}").json())["status"] not in ("completed", "failed"):
        disturb(batch["request_counts"]["completed"])
    lines = asked(server, "GET", f"files/{batch['output_file_id']}/content").text.splitlines()
    found = [json.loads(line) for line in lines]
    return batch, [
        (one["custom_id"], one["response"]["body"]["choices"], one["response"]["body"]["usage"]) for one in found
    ]


def test_kills_at_random_lines_change_no_byte_of_the_output(tmp_path: Path) -> None:
    rng = random.Random(11)
    due = sorted(rng.sample(range(LINES // 6, LINES * 2 // 3), len(KILLED)))
    killed: list[int] = []
    gone: set[int] = set()  # processes that were killed: the server tells of them until it has noticed

    def victims(stats: dict[str, Any]) -> list[int]:
        running = {"worker": [stats["worker"]], "frontend": stats["frontends"]}
        return [
            next((one["pid"] for one in running[name] if one["pid"] and one["pid"] not in gone), 0)
            for name in KILLED[len(killed)]
        ]

    def kill(completed: int) -> None:
        if len(killed) == len(KILLED) or completed < due[len(killed)]:
            return
        pids = victims(server.until(lambda stats: all(victims(stats))))
        gone.update(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed.append(completed)

    flags = ("--frontends", "2", "--batch-lines", "2", "--store", str(tmp_path / "answers.db"))
    with serving("demo", tmp_path / "log", *flags) as server:
        _, undisturbed = counted(server, lambda completed: None)
        batch, output = counted(server, kill)
        stats = server.stats()
    assert len(killed) == len(KILLED) and killed[-1] < LINES, "the batch ended before all kills"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert [one[0] for one in output] == [f"id-{id}" for id in range(LINES)] and output == undisturbed
    left = {name: stats["batches"][name] for name in ("batches", "lines_waiting", "lines_running")}
    assert not any(left.values()), left
