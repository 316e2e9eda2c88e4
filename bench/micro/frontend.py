"""Measures what a token, a stream, a request and the first token cost one real frontend process, for any model.

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
from bench.micro.scripted_worker import Script, admit, crowd, request
from frontend.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
PROMPT = "Once upon a time there was a little"
TEXT = """ girl who lived near the sea. Every day she went to the shore, and looked for shells that were white.
One morning she found a small boat. "Who are you?" asked the boat. "I am Anna," said the girl, "and I can row." """
DONE = b"[DONE]"
START_S = 30.0
LAG = re.compile(r'frontend_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')

BODY: dict[str, Any] = {"model": "demo", "max_tokens": 100_000, "stream": True, "stop": ["\n\nQuestion:", "</end>"]}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {**BODY, "prompt": PROMPT}),
    "events": ("/v1/completions", {**BODY, "prompt": PROMPT, "stream_format": "events"}),
    "chat": ("/v1/chat/completions", {**BODY, "messages": [{"role": "user", "content": PROMPT}]}),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A server under measurement."""

    pid: int
    port: int

    def cpu(self) -> float:
        """Seconds that all its threads have computed, to the nanosecond."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def lags(self) -> dict[float, float]:
        """How often the event loop was at most so many seconds late."""
        return {float(le): float(count) for le, count in LAG.findall(self.get("/metrics"))}

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())


@contextmanager
def started(words: Sequence[str], ready: str) -> Iterator[Process]:
    """`python -m words… PORT`, answering at `ready`; raises BenchError when it does not."""
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
def frontends(count: int) -> Iterator[tuple[Script, list[Process]]]:
    """Real frontends and their scripted worker."""
    tokenizer = Tokenizer.load(MODEL)
    words = [id for id in tokenizer.encode_now([TEXT])[0] if tokenizer.token_text(id).isprintable()]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        script = Script(Path(folder), "demo", words, tokenizer.vocab_size)
        stack.callback(script.close)
        command = [
            "deploy.cli.main",
            "frontend",
            "--run-dir",
            folder,
            "--model",
            "demo",
            "--access-log",
            "off",
            "--port",
        ]
        yield script, [stack.enter_context(started(command, "/ready")) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one load."""

    streams: int
    wake: int
    token_us: float  # CPU a token, the mean of all frontends
    lag_ms: float  # p99, to the bounds of its buckets
    stream_kb: float  # memory a stream
    admission_us: float  # CPU from the connection to the first token


def load(script: Script, servers: Sequence[Process], streams: int, wake: int, steps: int, ask: str) -> Row:
    path, body = ASKS[ask]
    events = wake if ask == "events" else 1
    empty = sum(server.memory() for server in servers)
    begun = sum(server.cpu() for server in servers)
    with crowd([server.port for server in servers], streams) as clients:
        clients.send(request(path, body))
        admit(script, streams)
        for _ in range(3):
            script.step(wake)
            clients.read(events)
        before, lags = sum(server.cpu() for server in servers), servers[0].lags()
        full = sum(server.memory() for server in servers)
        for _ in range(steps):
            script.step(wake)
            clients.read(events)
        spent = sum(server.cpu() for server in servers) - before
        late = servers[0].lags()
        script.step(last=True)
        clients.read(1, b"done" if ask == "events" else DONE)
    lag = _quantile({bound: count - lags.get(bound, 0.0) for bound, count in late.items()}, 0.99)
    return Row(
        streams, wake, 1e6 * spent / (steps * wake * streams), 1e3 * lag,
        (full - empty) / streams / 1024, 1e6 * (before - begun) / streams,
    )  # fmt: skip


def burst(script: Script, servers: Sequence[Process], streams: int, steps: int) -> str:
    """All of them at once, each answered as soon as its request is there; then a few steps together, and all end."""
    path, body = ASKS["completions"]
    empty = sum(server.memory() for server in servers)
    with crowd([server.port for server in servers], streams) as clients:
        clients.send(request(path, body))
        first = clients.read(1, meanwhile=lambda: script.receive(0.0, first=True))
        full = sum(server.memory() for server in servers)
        before = sum(server.cpu() for server in servers)
        for _ in range(steps):
            script.step()
            clients.read(1)
        spent = sum(server.cpu() for server in servers) - before
        script.step(last=True)
        whole = len(clients.read(1, DONE))
    return (
        f"{streams} streams at once on {len(servers)} frontends: first token p50 {first[streams // 2]:.2f} s, p99 "
        f"{first[streams * 99 // 100]:.2f} s; {1e6 * spent / streams / steps:.1f} µs CPU a token, "
        f"{(full - empty) / streams / 1024:.1f} KB a stream; {whole} ended with [DONE]"
    )


def _quantile(buckets: dict[float, float], q: float) -> float:
    """The bound below which a share `q` lies."""
    bounds = sorted(buckets)
    return next((bound for bound in bounds if buckets[bound] >= q * buckets[bounds[-1]]), bounds[-1])


def floor(server: Process, kind: str, streams: int, tokens: int) -> float:
    """CPU µs a token."""
    with crowd([server.port], streams) as clients:
        before = server.cpu()
        clients.send(request(f"/{kind}/{tokens}"))
        clients.read(1, DONE)
        return 1e6 * (server.cpu() - before) / (streams * tokens)


def requests(script: Script, server: Process, count: int) -> dict[str, float]:
    """CPU µs a request, one after another on one connection."""
    whole = request("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 1})
    spent = {}
    with crowd([server.port], 1) as clients:
        for name, text, mark in (
            ("GET /health", request("/health"), b'"ok"'),
            ("POST /v1/completions, 1 token", whole, b'"usage"'),
            ("the same, streamed", request(*ASKS["completions"]), DONE),
        ):
            for times in (count // 10, count):
                before = server.cpu()
                for _ in range(times):
                    clients.send(text)
                    if name[0] != "G":
                        admit(script, 1)
                        script.step(last=True)
                    clients.read(1, mark)
            spent[name] = 1e6 * (server.cpu() - before) / count
    return spent


def first(script: Script, server: Process, count: int) -> list[float]:
    """Milliseconds to the first token's event, idle, from a worker that answers at once; ascending."""
    text, added = request(*ASKS["completions"]), []
    for _ in range(count):
        with crowd([server.port], 1) as clients:
            begun = time.perf_counter()
            clients.send(text)
            admit(script, 1)
            script.step()
            clients.read(1)
            added.append(1e3 * (time.perf_counter() - begun))
            script.step(last=True)
            clients.read(1, DONE)
    return sorted(added)


PARTS = {"floors", "streams", "requests", "first", "burst"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="64,256,1024,4096")
    parser.add_argument("--wake", default="1,4", help="tokens that wait for a stream when it is woken")
    parser.add_argument("--ask", default="completions", choices=sorted(ASKS), help="dialect")
    parser.add_argument("--tokens", type=int, default=60_000, help="of a measurement, all streams together")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--only", default="floors,streams,requests,first", help="and burst")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - PARTS:
        parser.error(
            f"argument --only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(PARTS))}"
        )
    streams = [int(count) for count in args.streams.split(",")]
    if "floors" in parts:
        _floors(streams, args.tokens)
    with frontends(args.frontends) as (script, servers):
        for wake in map(int, args.wake.split(",")) if "streams" in parts else ():
            for count in streams:
                _show(load(script, servers, count, wake, max(10, args.tokens // count // wake), args.ask))
        if "burst" in parts:
            print(burst(script, servers, max(streams), 20))
        if "requests" in parts:
            for name, spent in requests(script, servers[0], 1000).items():
                print(f"{name}: {spent:.0f} µs CPU, {1e6 / spent:.0f} a second and core")
        if "first" in parts:
            times = first(script, servers[0], 300)
            print(f"first token: p50 {times[150]:.2f} ms, p99 {times[297]:.2f} ms")


def _floors(streams: Sequence[int], tokens: int) -> None:
    with started(["bench.micro.asgi_floor"], "/bare/1") as server:
        for kind in ("bare", "sse"):
            costs = [f"{floor(server, kind, count, max(10, tokens // count)):.1f}" for count in streams]
            print(f"floor, {kind}: {', '.join(costs)} µs a token")


def _show(row: Row) -> None:
    print(
        f"{row.streams} streams, {row.wake} a wake: {row.token_us:.2f} µs a token, {1e6 / row.token_us:.0f} tokens/s "
        f"a core, lag p99 ≤ {row.lag_ms:g} ms, {row.stream_kb:.1f} KB a stream, {row.admission_us:.0f} µs to admit it",
        flush=True,
    )


if __name__ == "__main__":
    main()
