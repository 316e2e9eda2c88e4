"""Measures the time in which a frontend reads a plain request: from the bytes of its body to the prompt's tokens.

    python -m bench.parsing [--against FOLDER]

FOLDER is another checkout of Sluice to compare with. Each checkout runs in its own process, and their rounds
alternate. Parsing the JSON is also measured separately. The tokenizer is the demo model's.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontend.api.openai import completions

ROOT = Path(__file__).parents[1]
ROUNDS, REQUESTS = 61, 300
BODIES = {
    "completion": b'{"model":"demo","prompt":"The capital of France is","max_tokens":64,"temperature":0,"stream":true}',
    "chat": b'{"model":"demo","messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user",'
    b'"content":"What is the capital of France?"}],"max_tokens":64,"temperature":0.7,"stream":true}',
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parsing", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout to measure beside this one")
    asked = parser.parse_args()
    folders = [ROOT, *([asked.against.resolve()] if asked.against else [])]
    processes = [_Process(folder) for folder in folders]
    for process in processes:
        process.measure()  # the first measurement is not counted: it imports modules and fills caches
    rounds = [[process.measure() for process in processes] for _ in range(ROUNDS)]
    print(f"µs a request, median of {ROUNDS} rounds of {REQUESTS} requests")
    for index, name in enumerate(work for kind in BODIES for work in (f"{kind}, JSON alone", kind)):
        columns = [[measured[index] for measured in column] for column in zip(*rounds, strict=True)]
        line = f"{name:24}" + "".join(f"{statistics.median(column):8.2f}" for column in columns)
        if asked.against:
            ratios = sorted(mine / other for mine, other in zip(*columns, strict=True))
            line += f"   ratio {statistics.median(ratios):.3f} (quartiles {ratios[ROUNDS // 4]:.3f} to "
            line += f"{ratios[3 * ROUNDS // 4]:.3f})"
        print(line)
    return 0


class _Process:
    """A child process that measures one checkout's frontend each time `measure` is called."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self) -> list[float]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [float(word) for word in self._process.stdout.readline().split()]


async def _serve() -> None:
    """Runs in the child process: answers each line of stdin with the µs of each kind of work."""
    works = await _works()
    while sys.stdin.readline():
        print(*[f"{await work():.4f}" for work in works], flush=True)


async def _works() -> list[Callable[[], Any]]:
    from frontend.api.openai import chat
    from frontend.api.openai.chat_request import ChatRequest
    from frontend.api.openai.completions import CompletionRequest
    from frontend.model_context import ModelContext
    from frontend.schema.decoding import decode
    from frontend.text.chat_template import ChatTemplate
    from frontend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path.cwd() / "deploy" / "demo" / "model")
    template = ChatTemplate(tokenizer.templates, tokenizer.named_tokens)
    context = ModelContext("demo", 512, 4096, tokenizer, template)

    def works_of(body: bytes, kind: Any, parse: Callable[[Any, Any], Any]) -> list[Callable[[], Any]]:
        async def json_alone() -> float:
            begun = time.perf_counter()
            for _ in range(REQUESTS):
                decode(body, kind)
            return (time.perf_counter() - begun) / REQUESTS * 1e6

        async def whole() -> float:
            begun = time.perf_counter()
            for _ in range(REQUESTS):
                await parse(decode(body, kind), context)
            return (time.perf_counter() - begun) / REQUESTS * 1e6

        return [json_alone, whole]

    of_completions = works_of(BODIES["completion"], CompletionRequest, completions.parse)
    return of_completions + works_of(BODIES["chat"], ChatRequest, chat.parse)


if __name__ == "__main__":
    if __spec__ is None:  # true in a process that _Process started, which runs this file by its path
        sys.path.pop(0)
        asyncio.run(_serve())
    else:
        sys.exit(main())
