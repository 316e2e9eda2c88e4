"""Two tenants: one attacks a server without a pause, the other's times are measured beside it and alone.

For each attack, the second tenant sends requests of the kind that shares most with it, one after another: first alone,
then beside the attack. Prints a Markdown table of the 99th percentiles of its time to the first token and of its time
between tokens. The exit code is 1 if one is more than twice as long beside the attack, or if a request failed.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.e2e.server import serving
from tests.images import seeing_checkpoint
from tests.patience import PATIENCE_S

MOST = 2.0  # times as long as alone
FLOOR_MS = {"first": 20.0, "between": 5.0}  # shorter times than this are as good as this
CHAT = "/v1/chat/completions"
HOSTILE, OTHER = {"Authorization": "Bearer sk-hostile"}, {"Authorization": "Bearer sk-other"}
Attack = Callable[[httpx.AsyncClient, int], Awaitable[Any]]


def chat(text: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True, **more}


@cache
def drawn(side: int) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((side, side), 20).convert("RGB").save(file, "JPEG", quality=30, progressive=True)
    return file.getvalue()


def image(side: int, number: int) -> str:
    """Returns an image with the same pixels and other bytes for each number, so that no decoded one is found again."""
    return "data:image/jpeg;base64," + base64.b64encode(drawn(side) + str(number).encode()).decode()


def seeing(url: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    return chat("", **more) | {"messages": [{"role": "user", "content": parts}]}


# the attacks: each is called again and again with a new number, by several tasks


async def templates(http: httpx.AsyncClient, number: int) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
    await http.post(CHAT, json=chat("x", chat_template=endless + f"{{# {number} #}}"))


async def grammars(http: httpx.AsyncClient, number: int) -> None:
    await http.post(CHAT, json=chat("x", guided_regex=f"((a{{60}}){{60}}){{{30 + number % 30}}}b{{{number}}}"))


async def gbnf(http: httpx.AsyncClient, number: int) -> None:
    await http.post(CHAT, json=chat("x", guided_grammar="root ::= " + f'"{number}" ' * 30_000))


async def images(http: httpx.AsyncClient, number: int) -> None:
    await http.post(CHAT, json=seeing(image(4000, number), max_tokens=1))


async def texts(http: httpx.AsyncClient, number: int) -> None:
    await http.post("/tokenize", json={"prompt": f"{number} " + "every word counts, " * 13_000})


async def breakers(http: httpx.AsyncClient, number: int) -> None:
    await http.post(CHAT, json=chat("x", dry_multiplier=1.0, dry_sequence_breakers=[f"{number}{n}" for n in range(20)]))


async def uploads(http: httpx.AsyncClient, number: int) -> None:
    """Begins a body of almost 1 MiB, and never ends it."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n{'Authorization'}: {HOSTILE['Authorization']}\r\n"
        writer.write(f"{head}Content-Length: 1000001\r\n\r\n".encode() + b" " * 1_000_000)
        await writer.drain()
        await reader.read(1)
    finally:
        writer.transport.abort()


async def requests(http: httpx.AsyncClient, number: int) -> None:
    await http.post(CHAT, json=chat(f"Tell me story {number}.", n=8, max_tokens=64))


@dataclass(frozen=True)
class Trial:
    """An attack by some tasks at the same time, and the requests of the other tenant; number → body.

    sees: whether they need a model that takes images
    """

    attack: Attack
    tasks: int = 16
    body: Callable[[int], dict[str, Any]] = lambda number: chat(f"Say {number}.")
    sees: bool = False


TRIALS: Mapping[str, Trial] = {
    "slow templates": Trial(templates),
    "slow regular expressions": Trial(grammars, body=lambda number: chat("Say", guided_regex=f"[a-z]{{30}}{number}?")),
    "long GBNF": Trial(gbnf, body=lambda number: chat("Say", guided_grammar=f'root ::= [a-z]+ "{number}"')),
    "large images": Trial(images, 6, lambda number: seeing(image(64, number)), sees=True),
    "long texts": Trial(texts, body=lambda number: chat(f"Say {number}. " + "word " * 100)),
    "breakers": Trial(breakers, 4),
    "unfinished uploads": Trial(uploads, 300, lambda number: chat(f"Say {number}.", user=" " * (2 << 20))),
    "requests": Trial(requests, 8),
}


@dataclass
class Times:
    """In milliseconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def p99(self, name: str) -> float:
        values = sorted(getattr(self, name))
        return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else float("nan")


async def measure(url: str, body: Callable[[int], dict[str, Any]], seconds: float, start: int) -> Times:
    """Sends one stream after another, and notes their times."""
    times, end, number = Times(), time.monotonic() + seconds, start
    async with httpx.AsyncClient(base_url=url, headers=OTHER, timeout=PATIENCE_S) as http:
        while time.monotonic() < end:
            number += 1
            sent = json.dumps(body(number)).encode()
            before, is_first = time.monotonic(), True
            async with http.stream("POST", CHAT, content=sent) as answer:
                if answer.status_code != 200:
                    times.failed.append(f"{answer.status_code} {(await answer.aread())[:200].decode()}")
                    await asyncio.sleep(0.1)
                    continue
                async for line in answer.aiter_lines():
                    if '"content":"' not in line and '"text":"' not in line:
                        continue
                    now = time.monotonic()
                    (times.first if is_first else times.between).append(1e3 * (now - before))
                    before, is_first = now, False
    return times


async def attacking(url: str, trial: Trial) -> None:
    """Attacks until a signal, or until the process that measures is gone."""
    measuring = os.getppid()

    async def one(first: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=HOSTILE, timeout=PATIENCE_S, limits=limits) as http:
            number = first
            while os.getppid() == measuring:
                with suppress(httpx.HTTPError, OSError):
                    await trial.attack(http, number)
                number += trial.tasks

    async with asyncio.TaskGroup() as group:
        for first in range(trial.tasks):
            group.create_task(one(first))


async def run(url: str, names: list[str], seconds: float) -> int:
    print("| attack | TTFT p99 alone | beside | | ITL p99 alone | beside | | refused |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    bad = 0
    for name in names:
        trial = TRIALS[name]
        await measure(url, trial.body, 2.0, 10**6)
        alone = await measure(url, trial.body, seconds, 0)
        # in another process, because the attack's own work must not delay the clock
        words = ["-m", "tests.tenants", "--only", name, "--attack", url]
        attack = subprocess.Popen([sys.executable, *words], start_new_session=True)
        await asyncio.sleep(5.0)
        beside = await measure(url, trial.body, seconds, 10**5)
        attack.terminate()
        attack.wait()
        cells = []
        for what in ("first", "between"):
            one, other = alone.p99(what), beside.p99(what)
            ratio = max(other, FLOOR_MS[what]) / max(one, FLOOR_MS[what])
            cells += [f"{one:.1f} ms", f"{other:.1f} ms", f"{ratio:.2f}"]
            bad += not ratio <= MOST
        bad += len(alone.failed) + len(beside.failed)
        print(f"| {name} | {' | '.join(cells)} | {len(beside.failed)} |", flush=True)
        for problem in {*alone.failed, *beside.failed}:
            print(problem, file=sys.stderr)
        await asyncio.sleep(6.0)  # what runs in children ends
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tenants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement (default: 60)")
    parser.add_argument("--only", choices=[*TRIALS], action="append", help="only this attack")
    parser.add_argument("--model", help="a model of texts (default: a tiny one that takes images)")
    parser.add_argument("--attack", metavar="URL", help="only attack the server there, until a signal")
    asked = parser.parse_args()
    if asked.attack:
        os.nice(19)  # it stands for another machine: its own work must not take the server's processors
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
        asyncio.run(attacking(asked.attack, TRIALS[asked.only[0]]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys"
        keys.write_text("sk-hostile hostile\nsk-other other\n")
        keys.chmod(0o600)
        model = asked.model or seeing_checkpoint("gemma3", folder / "model")
        names = asked.only or [name for name, trial in TRIALS.items() if not (trial.sees and asked.model)]
        flags = ("--api-keys", str(keys), "--trust-request-chat-template", "--access-log", "off")
        with serving(model, folder / "log", *flags) as server:
            return asyncio.run(run(server.url, names, asked.seconds))


if __name__ == "__main__":
    sys.exit(main())
