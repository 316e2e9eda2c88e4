"""Measures the cost of a token, a stream, a request and the first token in one real frontend process, for any model.

A scripted worker feeds it over the real wire, and a cheap client reads all streams (scripted_worker.py). Costs are CPU
time of the process, so a busy machine changes them little. Part `floors` measures a server that does no work
(asgi_floor.py).
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client.server import BenchError, free_port
from bench.micro.scripted_worker import ScriptedWorker, admit, connected_streams, request
from frontend.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
PROMPT = "Once upon a time there was a little"
TEXT = """ girl who lived near the sea. Every day she went to the shore, and looked for shells that were white.
One morning she found a small boat. "Who are you?" asked the boat. "I am Anna," said the girl, "and I can row." """
DONE = b"[DONE]"
START_S = 30.0
LAG = re.compile(r'frontend_loop_lag_seconds_bucket\{le="([^"]+)".*\} (\S+)')

BODY: dict[str, Any] = {"model": "demo", "max_tokens": 100_000, "stream": True, "stop": ["\n\nQuestion:", "</end>"]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {**BODY, "prompt": PROMPT}),
    "events": ("/v1/completions", {**BODY, "prompt": PROMPT, "stream_format": "events"}),
    "chat": ("/v1/chat/completions", {**BODY, "messages": [{"role": "user", "content": PROMPT}]}),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A frontend process to measure."""

    pid: int
    port: int

    def cpu(self) -> float:
        """Returns the CPU seconds of all threads of the process, to the nanosecond."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def loop_cpu(self) -> float:
        """Returns the CPU seconds of the main thread, which runs the event loop."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def memory(self) -> int:
        """Returns the resident memory in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def lags(self) -> dict[float, float]:
        """Returns the counts of event-loop delays, by their upper bound in seconds."""
        return {float(le): float(count) for le, count in LAG.findall(self.get("/metrics"))}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())


@contextmanager
def started(words: Sequence[str], ready: str) -> Iterator[Process]:
    """Runs `python -m words… PORT` until it answers at path `ready`. Raises BenchError if it does not."""
    port = free_port()
    command = [sys.executable, "-m", *words, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Process(process.pid, port)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                server.get(ready)
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{' '.join(command)} does not answer")
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()


@contextmanager
def frontends(count: int, *flags: str) -> Iterator[tuple[ScriptedWorker, list[Process]]]:
    """Starts real frontends, with these flags, and their scripted worker."""
    tokenizer = Tokenizer.load(MODEL)
    words = [id for id in tokenizer.encode_now([TEXT])[0] if tokenizer.token_text(id).isprintable()]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        worker = ScriptedWorker(Path(folder), "demo", words, tokenizer.vocab_size)
        stack.callback(worker.close)
        command = [
            "deploy.cli.main",
            "frontend",
            "--run-dir",
            folder,
            "--model",
            "demo",
            "--access-log",
            "off",
            *flags,
            "--port",
        ]
        yield worker, [stack.enter_context(started(command, "/ready")) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results for one load."""

    streams: int
    tokens_per_event: int
    token_us: float  # CPU µs per token, mean over all frontends
    lag_ms: float  # p99, rounded up to the bound of its bucket
    stream_kb: float  # memory per stream
    admission_us: float  # CPU µs from the connection to the first token


def load(
    worker: ScriptedWorker,
    servers: Sequence[Process],
    streams: int,
    tokens_per_event: int,
    steps: int,
    request_kind: str,
) -> LoadResult:
    path, body = REQUESTS[request_kind]
    events = tokens_per_event if request_kind == "events" else 1
    empty = sum(server.memory() for server in servers)
    begun = sum(server.cpu() for server in servers)
    with connected_streams([server.port for server in servers], streams) as clients:
        clients.send(request(path, body))
        admit(worker, streams)
        for _ in range(3):
            worker.step(tokens_per_event)
            clients.read(events)
        before, lags = sum(server.cpu() for server in servers), servers[0].lags()
        full = sum(server.memory() for server in servers)
        for _ in range(steps):
            worker.step(tokens_per_event)
            clients.read(events)
        spent = sum(server.cpu() for server in servers) - before
        late = servers[0].lags()
        worker.step(last=True)
        clients.read(1, b"done" if request_kind == "events" else DONE)
    lag = _quantile({bound: count - lags.get(bound, 0.0) for bound, count in late.items()}, 0.99)
    return LoadResult(
        streams, tokens_per_event, 1e6 * spent / (steps * tokens_per_event * streams), 1e3 * lag,
        (full - empty) / streams / 1024, 1e6 * (before - begun) / streams,
    )  # fmt: skip


def burst(worker: ScriptedWorker, servers: Sequence[Process], streams: int, steps: int) -> str:
    """Sends all requests at once and answers each on arrival. Then runs a few steps for all streams, and ends them."""
    path, body = REQUESTS["completions"]
    empty = sum(server.memory() for server in servers)
    with connected_streams([server.port for server in servers], streams) as clients:
        clients.send(request(path, body))
        first = clients.read(1, meanwhile=lambda: worker.receive(0.0, first=True))
        full = sum(server.memory() for server in servers)
        before = sum(server.cpu() for server in servers)
        for _ in range(steps):
            worker.step()
            clients.read(1)
        spent = sum(server.cpu() for server in servers) - before
        worker.step(last=True)
        whole = len(clients.read(1, DONE))
    return (
        f"{streams} streams at once on {len(servers)} frontends: first token p50 {first[streams // 2]:.2f} s, p99 "
        f"{first[streams * 99 // 100]:.2f} s; {1e6 * spent / streams / steps:.1f} µs CPU a token, "
        f"{(full - empty) / streams / 1024:.1f} KB a stream; {whole} ended with [DONE]"
    )


def _quantile(buckets: dict[float, float], q: float) -> float:
    """Returns the bucket bound below which a share `q` of the counts lies."""
    bounds = sorted(buckets)
    return next((bound for bound in bounds if buckets[bound] >= q * buckets[bounds[-1]]), bounds[-1])


def floor(server: Process, kind: str, streams: int, tokens: int) -> float:
    """Measures a server that does no work; returns CPU µs per token."""
    with connected_streams([server.port], streams) as clients:
        before = server.cpu()
        clients.send(request(f"/{kind}/{tokens}"))
        clients.read(1, DONE)
        return 1e6 * (server.cpu() - before) / (streams * tokens)


def requests(worker: ScriptedWorker, server: Process, count: int) -> dict[str, float]:
    """Returns CPU µs per request for several kinds of requests, which are sent one after another on one connection."""
    whole = request("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 1})
    spent = {}
    with connected_streams([server.port], 1) as clients:
        for name, text, mark in (
            ("GET /health", request("/health"), b'"ok"'),
            ("POST /v1/completions, 1 token", whole, b'"usage"'),
            ("the same, streamed", request(*REQUESTS["completions"]), DONE),
        ):
            for times in (count // 10, count):
                before = server.cpu()
                for _ in range(times):
                    clients.send(text)
                    if name[0] != "G":
                        admit(worker, 1)
                        worker.step(last=True)
                    clients.read(1, mark)
            spent[name] = 1e6 * (server.cpu() - before) / count
    return spent


def first(worker: ScriptedWorker, server: Process, count: int) -> list[float]:
    """Returns the milliseconds until the event of the first token, in ascending order. The frontend is idle, and the
    worker answers at once."""
    text, added = request(*REQUESTS["completions"]), []
    for _ in range(count):
        with connected_streams([server.port], 1) as clients:
            begun = time.perf_counter()
            clients.send(text)
            admit(worker, 1)
            worker.step()
            clients.read(1)
            added.append(1e3 * (time.perf_counter() - begun))
            worker.step(last=True)
            clients.read(1, DONE)
    return sorted(added)


PARTS = {"floors", "streams", "requests", "first", "burst"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="64,256,1024,4096")
    parser.add_argument("--wake", default="1,4", help="tokens per stream at each wake-up")
    parser.add_argument("--ask", default="completions", choices=sorted(REQUESTS), help="API format")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens per measurement, over all streams")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--only", default="floors,streams,requests,first", help="parts to run; there is also burst")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - PARTS:
        parser.error(
            f"argument --only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(PARTS))}"
        )
    streams = [int(count) for count in args.streams.split(",")]
    if "floors" in parts:
        _floors(streams, args.tokens)
    with frontends(args.frontends) as (worker, servers):
        for tokens_per_event in map(int, args.wake.split(",")) if "streams" in parts else ():
            for count in streams:
                _show(
                    load(
                        worker,
                        servers,
                        count,
                        tokens_per_event,
                        max(10, args.tokens // count // tokens_per_event),
                        args.ask,
                    )
                )
        if "burst" in parts:
            print(burst(worker, servers, max(streams), 20))
        if "requests" in parts:
            for name, spent in requests(worker, servers[0], 1000).items():
                print(f"{name}: {spent:.0f} µs CPU, {1e6 / spent:.0f} a second and core")
        if "first" in parts:
            times = first(worker, servers[0], 300)
            print(f"first token: p50 {times[150]:.2f} ms, p99 {times[297]:.2f} ms")


def _floors(streams: Sequence[int], tokens: int) -> None:
    with started(["bench.micro.asgi_floor"], "/bare/1") as server:
        for kind in ("bare", "sse"):
            costs = [f"{floor(server, kind, count, max(10, tokens // count)):.1f}" for count in streams]
            print(f"floor, {kind}: {', '.join(costs)} µs a token")


def _show(row: LoadResult) -> None:
    print(
        f"{row.streams} streams, {row.tokens_per_event} a wake: {row.token_us:.2f} µs a token, "
        f"{1e6 / row.token_us:.0f} tokens/s a core, lag p99 ≤ {row.lag_ms:g} ms, {row.stream_kb:.1f} KB a stream, "
        f"{row.admission_us:.0f} µs to admit it",
        flush=True,
    )


if __name__ == "__main__":
    main()
