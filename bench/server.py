"""A server for one measurement: started by its own command, on a free port, ended afterwards."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.client import Target

START_S = 600.0


@contextmanager
def served(model: str, flags: Sequence[str] = ()) -> Iterator[Target]:
    """`sluice serve --model model flags…`, ready; raises RuntimeError when it does not come up."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli", "serve", "--model", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--worker-metrics-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield Target(url, "m")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def stats(target: Target) -> dict[str, object]:
    with urllib.request.urlopen(target.url + "/stats", timeout=10) as answer:
        return dict(json.load(answer))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_S:.0f} s")
