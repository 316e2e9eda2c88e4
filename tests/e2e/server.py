"""Runs a real server with all its processes during a `with`; reads streams of typed events as a client does."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.held import Hold
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running server. client: talks to it. hold: holds its workers, if it was started so that they can be held.

    headers: sent by all methods that do not use the client; the key of a server with keys
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    client: httpx.Client
    hold: Hold
    headers: dict[str, str] = field(default_factory=dict)

    def stats(self) -> dict[str, Any]:
        """Returns /stats over a new connection, because the frontend that answered before may have been killed."""
        return dict(httpx.get(self.url + "/stats", headers=self.headers, timeout=PATIENCE_S).json())

    def until(self, true: Any, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Waits until `true(stats)` and returns the stats. Ignores lost connections, since a frontend may be killed."""
        deadline, stats = time.monotonic() + timeout, dict[str, Any]()
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if true(stats := self.stats()):
                    return stats
            time.sleep(0.05)
        raise AssertionError(f"waited in vain: {stats}")

    def until_idle(self) -> dict[str, Any]:
        """Waits until nothing runs or waits, and no page is owned."""
        return self.until(lambda s: not (s["running"] or s["waiting"] or s["pages"]["owned"]))

    def events(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> "Events":
        return read_events(self.client, {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **fields})


@dataclass
class Events:
    """A finished stream of typed events."""

    status: int
    ids: list[int]
    text: str
    done: dict[str, Any] | None
    error: str | None


def read_events(client: httpx.Client, body: dict[str, Any]) -> Events:
    body = {"temperature": 0, **body, "stream_format": "events"}
    ids: list[int] = []
    texts: list[str] = []
    ends: list[tuple[str, dict[str, Any]]] = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return Events(response.status_code, [], "", None, response.read().decode())
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                assert not ends, "something came after the end"
                kind = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                if kind == "token":
                    ids.append(data["token_id"])
                    texts.append(data["token"])
                else:
                    ends.append((kind, data))
    assert len(ends) == 1, f"one end, not {ends}"
    kind, data = ends[0]
    return Events(
        200, ids, "".join(texts), data if kind == "done" else None, data["error"] if kind == "error" else None
    )


@contextmanager
def serving(
    model: Path | str | None,
    log: Path,
    *flags: str,
    trust: ssl.SSLContext | None = None,
    entry: Sequence[str] = ("-m", "deploy.cli.main"),
    held: bool = False,
    name: str = "m",
) -> Iterator[Server]:
    """Runs `sluice serve` on a free port until it gets SIGTERM; asserts exit code 0 and that no process is left.

    trust: a TLS context that trusts the server's certificate; the server then uses https
    entry: arguments for Python that start the server. held: whether the test can hold its workers (held.py)
    name: the served name; empty: the name of the model's folder. Without a `model`, `flags` state the models.
    """
    hold = Hold(log.with_suffix(".hold"))
    port = free_port()
    url = f"{'https' if trust else 'http'}://127.0.0.1:{port}"
    command = [sys.executable, *(hold.entry if held else entry), "serve"]
    command += ["--model", str(model)] if model is not None else []
    command += ["--served-model-name", name] if name else []
    command += ["--port", str(port), "--worker-metrics-port", "0", "--threads", "1"]
    command += ["--drain-timeout", str(PATIENCE_S / 2), "--stop-timeout", str(PATIENCE_S * 0.8), *flags]
    with log.open("wb") as out, httpx.Client(base_url=url, timeout=PATIENCE_S, verify=trust or True) as client:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=_environment())
        try:
            _wait(client, process, log)
            yield Server(process, url, log, client, hold)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=PATIENCE_S)
        assert code == 0, log.read_text()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready in time: {log.read_text()}")
