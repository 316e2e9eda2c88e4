"""Sends the same requests twice; the second time, the server's worker gets SIGKILL while it computes them.

Every request must end well both times, with the same text.
"""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.client.load_client import Target
from bench.client.server import BenchError, served
from bench.gpu.environment import Environment, Row
from bench.gpu.measure.served import flags
from bench.gpu.setup.checkpoint import checkpoint
from bench.gpu.tables import FAIL, PASS

REQUESTS = 32
PROMPT, NEW = 64, 256  # tokens; without a GPU, fewer
MOST_S = 120.0
KILLED_AT = 0.3  # of the time that the requests took without a failure


def measure(env: Environment, model: str) -> Iterator[Row]:
    folder = checkpoint(env, model)
    with served(str(folder), flags(env)) as target:
        _texts(target, env, 2)  # warms up
        begun = time.monotonic()
        expected = _texts(target, env, REQUESTS)
        took = time.monotonic() - begun
        yield {"model": model, "what": "undisturbed", "requests": REQUESTS, "failed": expected.count(""), "s": took}
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            found = pool.submit(_texts, target, env, REQUESTS)
            time.sleep(KILLED_AT * took)
            worker = _worker()
            os.kill(worker, signal.SIGKILL)
            texts = found.result()
        same = sum(bool(text) and text == other for text, other in zip(texts, expected, strict=True))
        yield {
            "model": model, "what": "worker killed", "requests": REQUESTS, "failed": texts.count(""),
            "same texts": same, "s": time.monotonic() - begun, "result": PASS if same == REQUESTS else FAIL,
        }  # fmt: skip


def _texts(target: Target, env: Environment, count: int) -> list[str]:
    """Returns the text of each request, half of them sampled with a seed; empty for one that failed."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: _text(target, env, number), range(count)))


def _text(target: Target, env: Environment, number: int) -> str:
    length, new = (PROMPT, NEW) if env.cuda else (PROMPT // 4, NEW // 8)
    prompt = [300 + (number * 37 + at * 11) % 1000 for at in range(length)]
    how = {"temperature": 0.9, "seed": number, "top_p": 0.95} if number % 2 else {"temperature": 0}
    body = {"model": target.model, "prompt": prompt, "max_tokens": new, "ignore_eos": True, **how}
    request = urllib.request.Request(
        f"{target.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=MOST_S) as response:
            return str(json.load(response)["choices"][0]["text"])
    except OSError:
        return ""


def _worker() -> int:
    """Returns the process id of the worker of the server that this process has started."""
    parents, workers = dict[int, int](), list[int]()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"worker" in (folder / "cmdline").read_bytes().split(b"\0"):
                    workers.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    for worker in workers:
        process: int | None = worker
        while process is not None and process != os.getpid():
            process = parents.get(process)
        if process is not None:
            return worker
    raise BenchError("the server has no worker that could be killed")
