"""Kills random workers of a real server while many answers stream, and counts what the clients see.

    python -m bench.workloads.kills [--workers 8] [--frontends 2] [--streams 200] [--tokens 160] [--kills 6]

`sluice serve` starts the demo model. The same requests are sent in two rounds at temperature 0. The first round is
undisturbed. In the second, a random worker gets SIGKILL every --pause seconds, and the launcher restarts it. An answer
is lost if it does not end with a finish reason and `[DONE]`. It differs if its text is not the text of the first round.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.client.load_client import Target
from bench.client.server import served
from bench.client.summary import aligned
from bench.packages import httpx
from shared.config.flags import positive_float, positive_int

WAIT_S = 600.0  # timeout for the start of all workers, and for an answer


@dataclass(frozen=True)
class Answer:
    """What a client received. text: None if the answer was lost"""

    text: str | None
    longest_gap: float  # longest time in seconds before the first piece, or between two pieces


async def ask(client: httpx.AsyncClient, target: Target, number: int, tokens: int) -> Answer:
    body = {
        "model": target.model, "prompt": f"Story number {number}:", "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    text, finished, done, gap, last = "", "", False, 0.0, time.monotonic()
    with suppress(httpx.HTTPError):
        async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                gap, last = max(gap, now - last), now
                done = line == "data: [DONE]"
                for choice in () if done else json.loads(line[6:]).get("choices", ()):
                    text += choice["text"]
                    finished = choice["finish_reason"] or finished
    return Answer(text if done and finished == "length" else None, gap)


async def pids(client: httpx.AsyncClient, target: Target) -> list[int]:
    """Returns the process ids of the workers that are ready now."""
    stats = (await client.get(f"{target.url}/stats")).json()
    return [one["pid"] for one in stats["workers"] if one["ready"]]


async def kill(client: httpx.AsyncClient, target: Target, kills: int, pause: float, killed: list[int]) -> None:
    """Kills a random ready worker every `pause` seconds, and adds its process id to `killed`."""
    draw = random.Random(0)
    for _ in range(kills):
        await asyncio.sleep(pause)
        with suppress(httpx.HTTPError, ProcessLookupError):
            killed.append(draw.choice(await pids(client, target)))
            os.kill(killed[-1], signal.SIGKILL)


async def measure(target: Target, args: argparse.Namespace) -> list[list[str]]:
    """Returns a row for the round without kills, and one for the round with them."""
    limits = httpx.Limits(max_connections=args.streams + 1)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
        deadline = time.monotonic() + WAIT_S
        while len(await pids(client, target)) < args.workers and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
        rows, expected = list[list[str]](), list[Answer]()
        for kills in (0, args.kills):
            begun, killed = time.monotonic(), list[int]()
            killer = asyncio.create_task(kill(client, target, kills, args.pause, killed))
            answers = await asyncio.gather(*(ask(client, target, n, args.tokens) for n in range(args.streams)))
            seconds = time.monotonic() - begun
            killer.cancel()
            expected = expected or answers
            rows.append(row(kills, len(killed), answers, expected, seconds))
        return rows


def row(kills: int, killed: int, answers: list[Answer], expected: list[Answer], seconds: float) -> list[str]:
    lost = sum(answer.text is None for answer in answers)
    both = zip(answers, expected, strict=True)
    differ = sum(answer.text is not None and answer.text != one.text for answer, one in both)
    gap = max((answer.longest_gap for answer in answers), default=0.0)
    count = f"{killed} of {kills}" if kills else "none"
    return [count, str(len(answers)), str(lost), str(differ), f"{gap:.1f}", f"{seconds:.0f}"]


HEAD = ["workers killed", "answers", "lost", "differ", "longest wait, s", "seconds"]


def main(argv: list[str] | None = None, show: Callable[[Any], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("workers", 8), ("frontends", 2), ("streams", 200), ("tokens", 160), ("kills", 6)):
        parser.add_argument(f"--{name}", type=positive_int, default=default)
    parser.add_argument("--pause", type=positive_float, default=2.0, help="seconds between two kills")
    args = parser.parse_args(argv)
    flags = ["--workers", args.workers, "--frontends", args.frontends, "--threads", 1, "--kv-cache-gb", 0.1]
    with served("demo", [str(flag) for flag in flags]) as target:
        show(aligned([HEAD, *asyncio.run(measure(target, args))]))


if __name__ == "__main__":
    main()
