"""Measures a switch between two models when only one fits: the seconds from a request to its first token.

    python -m bench.model_switch MODEL.gguf OTHER.gguf --llama-server PATH

A request for the model that is not loaded unloads the loaded one. Cold: the model's files and the server's converted
copy are not in the page cache. Warm: they are, because this host has served the model before. After each switch, a
second request gives the time with a loaded model. llama.cpp runs as a router (`--models-dir`, `--models-max 1`).
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.packages import httpx

PROMPT = "Once upon a time there was a small house at the edge of a large forest, and in it"
START_S, ANSWER_S = 120.0, 300.0


@dataclass(frozen=True)
class Server:
    """A server to measure. stored: the folder in which the server caches converted models"""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    stored: Path | None = None


def servers(folder: Path, cache: Path, port: int, llama_server: Path | None) -> list[Server]:
    ours = [
        sys.executable, "-m", "deploy.cli.main", "serve", "--models-dir", str(folder), "--max-loaded-models", "1",
        "--port", str(port), "--device", "cpu", "--kv-cache-gb", "0.5",
    ]  # fmt: skip
    found = [
        Server("sluice", ours),
        Server("sluice --weights-cache", [*ours, "--weights-cache", str(cache)], stored=cache),
    ]
    if llama_server is not None:
        theirs = [str(llama_server), "--models-dir", str(folder), "--models-max", "1", "--port", str(port)]
        theirs += ["--ctx-size", "4096", "--threads", str(len(os.sched_getaffinity(0)))]
        found.append(Server("llama.cpp router", theirs, {"LD_LIBRARY_PATH": str(llama_server.parent)}))
    return found


@contextlib.contextmanager
def serving(server: Server, port: int, log: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            server.command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **server.environment}
        )
        try:
            wait_until_listed(url, process)
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_until_listed(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


def first_token_s(url: str, model: str) -> float:
    """Sends a request for a model. Returns the seconds until the first event that has a choice."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "stream": True}
    began, first = time.monotonic(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=ANSWER_S) as answer:
        for line in answer.iter_lines():
            if answer.status_code != 200 or '"error"' in line:
                raise RuntimeError(f"{model}: {answer.status_code} {line}")
            if line.startswith("data: {") and '"choices"' in line and not first:
                first = time.monotonic() - began
    return first


def forget(files: Sequence[Path]) -> None:
    """Drops files from the page cache, except those that a process has mapped."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(server: Server, url: str, models: dict[str, Path], rounds: int, pause: float) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "loaded": []}
    for name in models:
        first_token_s(url, name)  # fills the caches of the server
    for _ in range(rounds):
        for kind in ("cold", "warm"):
            for name, file in models.items():
                if kind == "cold":
                    stored = [path for path in server.stored.rglob("*") if path.is_file()] if server.stored else []
                    forget([file, *stored])
                seconds[kind].append(first_token_s(url, name))
                seconds["loaded"].append(first_token_s(url, name))
                time.sleep(pause)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.model_switch", description=__doc__)
    parser.add_argument("models", nargs=2, type=Path, help="two GGUF files")
    parser.add_argument("--llama-server", type=Path, help="the program, to compare with; none: only Sluice")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=3.0, help="seconds in which somebody reads an answer [%(default)g]"
    )
    parser.add_argument("--port", type=int, default=8766)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, cache = Path(made) / "models", Path(made) / "cache"
        folder.mkdir()
        cache.mkdir()
        models = {file.stem: file.resolve() for file in args.models}
        for name, file in models.items():
            (folder / f"{name}.gguf").symlink_to(file)
        print(f"{', '.join(models)}; median (least, most) of {2 * args.rounds} switches, seconds to the first token")
        for server in servers(folder, cache, args.port, args.llama_server):
            log = Path(made) / "log"
            try:
                with serving(server, args.port, log) as url:
                    found = measure(server, url, models, args.rounds, args.pause)
            except (RuntimeError, TimeoutError, httpx.HTTPError):
                print(log.read_text()[-2000:], file=sys.stderr)
                raise
            for kind, values in found.items():
                print(
                    f"{server.name}: {kind} {statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
