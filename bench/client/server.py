"""Servers to measure: starts a server and ends it afterwards, or uses a server that already runs.

Every failure is a `BenchError`: one sentence for the person at the terminal.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from bench.client.load_client import Target

START_S = 600.0
STOP_S = 60.0


class BenchError(Exception):
    """Nothing can be measured; the message says why in one sentence."""


@contextmanager
def served(model: str, flags: Sequence[str] = ()) -> Iterator[Target]:
    """Runs `sluice serve --model MODEL FLAGS…` and yields the server when it is ready. Raises BenchError if it never
    becomes ready."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--model", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--worker-metrics-port", "0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield Target(url, "m")
        finally:
            _stop(process)


def running(url: str, model: str) -> Target:
    """Returns the server at `url`. model: if empty, the server's first model. Raises BenchError."""
    url = url.rstrip("/").removesuffix("/v1")
    names = list(_models(url))
    if not names:
        raise BenchError(f"{url} serves no model")
    if model and model not in names:
        raise BenchError(f"{url} does not serve {model!r} but {', '.join(names)}")
    return Target(url, model or names[0])


def longest(target: Target) -> int:
    """Returns the server's maximum sequence length in tokens, or 0 if the server does not report it."""
    return _models(target.url).get(target.model, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _models(url: str) -> dict[str, int]:
    try:
        listing = _get(url + "/v1/models")
        return {entry["id"]: entry.get("max_model_len") or 0 for entry in listing["data"]}
    except urllib.error.HTTPError as error:
        raise BenchError(f"{url}/v1/models answers {error.code} {error.reason}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{url}/v1/models does not list models") from error
    except (OSError, ValueError) as error:
        raise BenchError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from error


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def _wait(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"the server ended with {process.returncode} before it was ready: {_last_line(log)}")
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise BenchError(f"the server was not ready within {START_S:.0f} s: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
        return
    process.kill()
    process.wait()
