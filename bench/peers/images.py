"""Compares servers that already run: the time to the first token of questions about images.

    python -m bench.peers.images http://127.0.0.1:8000 http://127.0.0.1:8080 [--sides 448,1024] [--rounds 3]

Servers are asked in turns. Each server gets two questions about a new image. A server that caches its results for an
image answers the second question sooner. Figures are medians, and ratios to the first server.
"""

import base64
import io
import json
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from bench.client.server import BenchError, running
from bench.client.summary import aligned, number
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated

SIDES = ("224", "448", "512", "896", "1024", "2048")  # sides of images in pixels
COARSE = 16  # side in pixels of one-coloured squares, which keep files small
QUESTIONS = ("What is this?", "Which colours has it?")
TIMEOUT_S = 300.0


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.peers.images", description="Compares servers that see images.")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--sides", type=comma_separated(SIDES), default="448,1024", metavar="PIXELS,...")
    parser.add_argument("--rounds", type=int, default=3)
    try:
        print(compare(parser.read(words)))
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers.images: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def compare(args: Namespace) -> str:
    """Returns the table in Markdown. Raises BenchError if a server does not answer."""
    targets = [running(url, "") for url in args.urls]
    seed = time.time_ns()
    for target in targets:  # starts the server's image-decoding processes before measuring
        first_token(target.url, target.model, image(64, seed), QUESTIONS[0])
    rows = [["image, question", *args.urls, *(f"ratio {place}" for place in range(2, len(targets) + 1))]]
    for side in map(int, args.sides):
        times: list[list[list[float]]] = [[[] for _ in targets] for _ in QUESTIONS]
        for _ in range(args.rounds):
            seed += 1
            shown = image(side, seed)
            for place, target in enumerate(targets):
                for question, found in zip(QUESTIONS, times, strict=True):
                    found[place].append(first_token(target.url, target.model, shown, question))
        for which, found in zip(("first", "second"), times, strict=True):
            ours, *others = medians = [median(one) for one in found]
            rows.append([f"{side}², {which}", *map(number, medians), *(f"{other / ours:.2f}" for other in others)])
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return aligned(rows)


def image(side: int, seed: int) -> str:
    """Returns a square image, `side` pixels wide, as a data: URL."""
    levels = np.random.default_rng(seed).integers(0, 256, (side // COARSE, side // COARSE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def first_token(url: str, model: str, shown: str, question: str) -> float:
    """Reads a whole answer and returns the seconds until it begins. Raises BenchError if it has no token."""
    parts = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": question}]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 2, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    begun, found = time.perf_counter(), 0.0
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            for line in answer:
                if not found and line.startswith(b"data: {") and begins(json.loads(line[6:])):
                    found = time.perf_counter() - begun
    except (OSError, ValueError) as error:
        detail = error.read()[:200].decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        raise BenchError(f"{url} does not answer: {error} {detail}") from error
    if not found:
        raise BenchError(f"{url} has ended an answer without a token")
    return found


def begins(chunk: dict[str, Any]) -> bool:
    """Whether a chunk of a stream shows that the first token has arrived: it has text, or ends the answer."""
    return any(one["delta"].get("content") or one.get("finish_reason") for one in chunk.get("choices", ()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
