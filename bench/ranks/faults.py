"""Repeatedly kills (SIGKILL) or stops (SIGSTOP) ranks of a worker while streams run.

    python -m bench.ranks.faults --ranks 2 --faults 20 --streams 16 [--stages 2] [--hosts]

Each client asks for answers one after another, sampled with its own seeds. The ranks get SIGKILL or SIGSTOP in turn
while all streams run. Every answer is compared with the answer of a server without faults. If a worker dies before it
has admitted a request, the request is answered with 503 and the client asks again; this counts as refused, not as lost.
The exit code is 1 if an answer is wrong or a stream is lost.

With --hosts, the ranks connect as on several hosts, and exchange rows by TCP. Only SIGKILL is sent, because a process
that is stopped on another host could not be ended from here.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client.server import free_port
from bench.packages import httpx

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "model"
START_S, REQUEST_S = 300.0, 600.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
NAP_S = 0.05


@dataclass
class Seen:
    """What the clients observed. pauses: the longest pause of each answer, in seconds."""

    pauses: list[float] = field(default_factory=list)
    answers: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: int = 0


@contextmanager
def serving(model: str, flags: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--model", model, "--served-model-name", "m"]
    command += ["--device", "cpu", "--port", str(port), "--worker-metrics-port", "0", "--kv-cache-gb", "0.2", *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
        try:
            ready(url)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextmanager
def other_hosts(model: str, ranks: int, flags: Sequence[str]) -> Iterator[dict[str, str]]:
    """Runs all ranks but rank 0 and restarts them when they end, as a supervisor on other hosts would.
    Yields the environment variables of rank 0."""
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "deploy.cli.main", "worker", "--model", model, "--device", "cpu", *flags]
    running: dict[int, subprocess.Popen[bytes]] = {}
    stop = threading.Event()

    def keep(rank: int) -> None:
        while not stop.is_set():
            variables = {**os.environ, **group, "RANK": str(rank)}
            running[rank] = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables
            )
            running[rank].wait()

    keepers = [threading.Thread(target=keep, args=(rank,)) for rank in range(1, ranks)]
    for keeper in keepers:
        keeper.start()
    try:
        yield group | {"RANK": "0"}
    finally:
        stop.set()
        for keeper in keepers:
            while keeper.is_alive():
                for process in running.values():
                    process.kill()
                keeper.join(NAP_S)


def ready(url: str) -> dict[str, Any]:
    """Waits until the worker is ready and returns the worker's part of /stats. Raises TimeoutError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            workers = httpx.get(url + "/stats", timeout=10).json()["workers"]
            if workers and workers[0]["ready"]:
                return dict(workers[0])
        except httpx.TransportError:
            pass
        time.sleep(NAP_S)
    raise TimeoutError(f"the server was not ready within {START_S:.0f} s")


def ask(url: str, seed: int, tokens: int, seen: Seen) -> list[int]:
    """Returns the token ids of one answer. If the stream is lost, returns only the ids that arrived before."""
    body = {
        "model": "m", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 1.0, "seed": seed,
        "ignore_eos": True, "stream_format": "events",
    }  # fmt: skip
    while True:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=REQUEST_S) as answer:
            if answer.status_code == 503:
                answer.read()
                seen.refused += 1
                time.sleep(NAP_S)
                continue
            answer.raise_for_status()
            return read(answer.iter_lines(), seen)


def read(lines: Iterator[str], seen: Seen) -> list[int]:
    ids: list[int] = []
    kind, last, pause = "", time.monotonic(), 0.0
    for line in lines:
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: ") and kind == "token":
            ids.append(json.loads(line[6:])["token_id"])
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
        elif line.startswith("data: ") and kind == "error":
            seen.lost.append(line)
    seen.pauses.append(pause)
    return ids


def client(url: str, seed: int, tokens: int, expected: list[int], seen: Seen, stop: threading.Event) -> None:
    """Sends requests one after another until `stop` is set, and compares each answer with `expected`."""
    while not stop.is_set():
        try:
            found = ask(url, seed, tokens, seen)
        except httpx.HTTPError as error:
            seen.lost.append(f"{type(error).__name__}: {error}")
            continue
        seen.answers += 1
        seen.wrong += found != expected


def strike(url: str, ranks: int, number: int, signals: Sequence[signal.Signals]) -> tuple[int, str, float]:
    """Sends fault number `number` to a rank. Returns the rank, the signal's name, and the seconds until the worker is
    ready again. Ranks and signals take turns."""
    pids = [rank["pid"] for rank in ready(url)["ranks"]]
    victim, sent = number % ranks, signals[number // ranks % len(signals)]
    begun = time.monotonic()
    os.kill(pids[victim], sent)
    while {rank["pid"] for rank in ready(url)["ranks"]} & {*pids}:
        time.sleep(NAP_S)
    return victim, sent.name, time.monotonic() - begun


def measure(asked: argparse.Namespace) -> Seen:
    flags: tuple[str, ...] = ("--threads", str(asked.ranks), "--stall-timeout", str(asked.stall_timeout))
    unused = Seen()
    with serving(asked.model, flags) as url, ThreadPoolExecutor(asked.streams) as pool:
        expected = list(pool.map(lambda seed: ask(url, seed, asked.tokens, unused), range(asked.streams)))
    seen, stop = Seen(), threading.Event()
    tp_size = str(asked.ranks // asked.stages)
    parallel = ("--tensor-parallel-size", tp_size, "--pipeline-parallel-size", str(asked.stages))
    flags = (*flags, *parallel)
    with ExitStack() as stack:
        variables: dict[str, str] = {}
        if asked.hosts:
            there = ("--rank-group", "torchrun", "--insecure", "--threads", "1")
            variables = stack.enter_context(other_hosts(asked.model, asked.ranks, (*there, *parallel)))
            flags = (*flags, *there)
        url = stack.enter_context(serving(asked.model, flags, variables))
        strike_all(asked, url, expected, seen, stop)
    return seen


def strike_all(
    asked: argparse.Namespace, url: str, expected: Sequence[list[int]], seen: Seen, stop: threading.Event
) -> None:
    """Sends all faults to a server's ranks while clients send requests."""
    signals = SIGNALS[:1] if asked.hosts else SIGNALS
    with ThreadPoolExecutor(asked.streams) as pool:
        clients = [
            pool.submit(client, url, seed, asked.tokens, expected[seed], seen, stop) for seed in range(asked.streams)
        ]
        try:
            for number in range(asked.faults):
                time.sleep(asked.between)
                rank, name, took = strike(url, asked.ranks, number, signals)
                print(
                    f"{number + 1:3}: {name} of rank {rank}; the next worker was ready after {took:.1f} s", flush=True
                )
        finally:
            stop.set()
        for one in clients:
            one.result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.faults", description=__doc__)
    parser.add_argument("--model", default=str(DEMO), help="a checkpoint's folder; by default the demo model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline, which divide the ranks")
    parser.add_argument("--hosts", action="store_true", help="ranks as on hosts of their own, by TCP")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--between", type=float, default=2.0, help="seconds from a worker's start to the next fault")
    parser.add_argument(
        "--stall-timeout", type=float, default=5.0, help="that of sluice serve, which ends a stopped rank"
    )
    asked = parser.parse_args()
    seen = measure(asked)
    print(f"{seen.answers} answers, {len(seen.lost)} lost, {seen.wrong} wrong, {seen.refused} refused and asked again")
    print(f"longest pause between two tokens: {max(seen.pauses, default=0.0):.1f} s")
    print(*seen.lost[:5], sep="\n", end="")
    return 1 if seen.lost or seen.wrong or not seen.answers else 0


if __name__ == "__main__":
    sys.exit(main())
