"""Measures whether a running batch disturbs live streams: inter-token latency of a few streams, without and beside one.

`python -m bench.micro.beside_batch --model smollm2 --pairs 6` starts one server with a store. In each pair, the same
live streams run once without a batch, and once while a batch has lines that wait; the order turns with each pair.
"""

import argparse
import asyncio
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.client.server import served

PROMPT, TOKENS = "Once upon a time there was a little", 96


async def gaps(url: str, streams: int) -> list[float]:
    """Returns the seconds between two tokens, of all streams."""

    async def one(seed: int) -> list[float]:
        body = {
            "model": "m", "prompt": f"{PROMPT} {seed}", "max_tokens": TOKENS, "ignore_eos": True, "seed": seed,
            "stream": True,
        }  # fmt: skip
        times = []
        async with (
            httpx.AsyncClient(base_url=url, timeout=600) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    return [gap for each in await asyncio.gather(*map(one, range(streams))) for gap in each]


def begin_batch(http: httpx.Client, lines: int) -> str:
    """Begins a batch of short prompts and returns its id, as soon as lines run."""
    bodies = [
        {"model": "m", "prompt": f"{PROMPT} {number}", "max_tokens": 64, "ignore_eos": True} for number in range(lines)
    ]
    texts = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(texts)
    file = http.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"}).raise_for_status().json()
    made = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = http.post("/v1/batches", json=made).raise_for_status().json()
    while http.get("/stats").json()["batches"]["lines_running"] == 0:
        time.sleep(0.05)
    return str(batch["id"])


def end_batch(http: httpx.Client, id: str) -> int:
    """Cancels a batch, waits until it has ended, and returns how many of its lines were answered."""
    answered = int(http.get(f"/v1/batches/{id}").json()["request_counts"]["completed"])
    http.post(f"/v1/batches/{id}/cancel")
    while http.get(f"/v1/batches/{id}").json()["status"] != "cancelled":
        time.sleep(0.05)
    return answered


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--lines", type=int, default=2000)
    args = parser.parse_args()
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    answered = 0
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--store", str(Path(folder) / "answers.db"))
        with served(args.model, flags) as server, httpx.Client(base_url=server.url, timeout=600) as http:
            asyncio.run(gaps(server.url, args.streams))
            for pair in range(args.pairs):
                for with_batch in (pair % 2 == 0, pair % 2 == 1):
                    id = begin_batch(http, args.lines) if with_batch else ""
                    (beside if with_batch else alone).append(asyncio.run(gaps(server.url, args.streams)))
                    answered += end_batch(http, id) if id else 0
    print(f"{answered} lines answered beside {args.pairs} times {args.streams} streams of {TOKENS} tokens")
    print("| ITL | alone, ms | beside a batch, ms | ratio, median of pairs |\n|---|--:|--:|--:|")
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        one, other = ([1e3 * quantile(each, q) for each in found] for found in (alone, beside))
        ratios = [b / a for a, b in zip(one, other, strict=True)]
        print(
            f"| {name} | {median(one):.2f} | {median(other):.2f} | {median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
