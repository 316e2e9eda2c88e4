"""Soak test of a server with more models than fit in memory: random requests, while processes are killed.

    python -m bench.many_models

Each of six models is the demo model with different noise in its weights; only three fit at once. Sixteen clients ask
for them in random order over three frontends. Every ten seconds a process is killed: a worker, a frontend, or the
worker of a model just after an order to unload the model. A client repeats a request that was refused with 503 or whose
connection broke. Every answer is compared with the model's undisturbed answer. The exit code is 1 if an answer was
wrong or a request was never answered.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.packages import httpx

DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
NOISE = 1.0  # size of the noise, relative to the standard deviation of the embeddings: large enough that texts differ
START_S = 120.0
REQUEST_S = 300.0  # time after which a request counts as lost


def make_models(folder: Path, count: int) -> list[str]:
    """Writes the models, and returns their names."""
    weights = load_file(DEMO / "model.safetensors")
    for index in range(count):
        shutil.copytree(DEMO, folder / f"model-{index}")
        generator = torch.Generator().manual_seed(index)
        changed = dict(weights)
        name = next(name for name in weights if "embed_tokens" in name)
        wide = weights[name].float()
        noise = torch.randn(wide.shape, generator=generator) * NOISE * wide.std()
        changed[name] = (wide + noise).to(weights[name].dtype)
        save_file(changed, folder / f"model-{index}" / "model.safetensors", {"format": "pt"})
    return [f"model-{index}" for index in range(count)]


@contextlib.contextmanager
def serving(folder: Path, log: Path, port: int, room: int, frontends: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "deploy.cli.main", "serve", "--models-dir", str(folder), "--port", str(port),
        "--max-loaded-models", str(room), "--frontends", str(frontends), "--device", "cpu", "--kv-cache-gb", "0.05",
        "--threads", "1",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


def ask(url: str, model: str, prompt: int, counts: Counter[str]) -> str:
    """Returns the text of one answer; asks again after a refusal or a broken connection."""
    body = {"model": model, "prompt": f"Once upon a time {prompt}", "max_tokens": 16, "temperature": 0}
    deadline = time.monotonic() + REQUEST_S
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_S)
        except httpx.TransportError:
            counts["connections broken"] += 1
            continue
        if answer.status_code == 503:
            counts["refused: " + str(answer.json()["error"]["code"])] += 1
            time.sleep(min(1.0, float(answer.headers["Retry-After"])))
            continue
        if answer.status_code != 200 or answer.json()["model"] != model:
            counts["wrong"] += 1
            return ""
        return str(answer.json()["choices"][0]["text"])
    counts["lost"] += 1
    return ""


def kill_some(
    launcher: int, url: str, names: list[str], every_s: float, seed: int, counts: Counter[str], stop: threading.Event
) -> None:
    rng = random.Random(seed)
    while not stop.wait(every_s):
        kind = rng.choice(["worker", "frontend", "unload"])
        found = sorted(
            pid for pid, words in children(launcher).items() if ("frontend" in words) == (kind == "frontend")
        )
        if kind == "unload":
            found = unloading(launcher, url, rng.choice(names))
            time.sleep(rng.random() / 2)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                counts["workers killed after an order to unload" if kind == "unload" else f"{kind}s killed"] += 1


def children(launcher: int) -> dict[int, list[str]]:
    """Returns the command lines of the server's processes, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if f"--parent={launcher}" in words:
                found[int(folder.name)] = words
    return found


def unloading(launcher: int, url: str, name: str) -> list[int]:
    """Orders a model to be unloaded. Returns the pid of its worker, or an empty list if it is not loaded."""
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{url}/models/unload", json={"model": name})
    return [pid for pid, words in children(launcher).items() if f"--served-model-name={name}" in words]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.many_models", description=__doc__)
    for name, default in {
        "models": 6, "room": 3, "requests": 200, "clients": 16, "frontends": 3, "seed": 35, "port": 8765,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kill-every-s", type=float, default=10.0)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    url, rng = f"http://127.0.0.1:{args.port}", random.Random(args.seed)
    with tempfile.TemporaryDirectory() as made:
        folder, log = Path(made) / "models", Path(made) / "log"
        folder.mkdir()
        names = make_models(folder, args.models)
        with serving(folder, log, args.port, args.room, args.frontends) as process:
            wait_until_ready(url)
            expected = {(name, prompt): ask(url, name, prompt, counts) for name in names for prompt in range(2)}
            asked = [(rng.choice(names), rng.randrange(2)) for _ in range(args.requests)]
            before, begun, stop = log.read_text(), time.monotonic(), threading.Event()
            about = (process.pid, url, names, args.kill_every_s, args.seed, counts, stop)
            killer = threading.Thread(target=kill_some, args=about)
            killer.start()
            with ThreadPoolExecutor(args.clients) as pool:
                texts = list(pool.map(lambda one: ask(url, one[0], one[1], counts), asked))
            took = time.monotonic() - begun
            stop.set()
            killer.join()
        lines = log.read_text()[len(before) :].splitlines()
    right = sum(text == expected[one] for text, one in zip(texts, asked, strict=True))
    counts["wrong"] += sum(text not in ("", expected[one]) for text, one in zip(texts, asked, strict=True))
    print(f"{len(asked)} requests for {len(names)} models with room for {args.room}, {took:.0f} s")
    print(f"different texts of the models: {len({expected[name, 0] for name in names})} of {len(names)}")
    print(f"answered with the bytes of an undisturbed server: {right}")
    print(f"loads: {sum(line.endswith(' is loaded') for line in lines)}")
    print(f"unloads: {sum(line.endswith(' is unloaded') for line in lines)}")
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    return 0 if right == len(asked) and not counts["wrong"] and not counts["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
