"""`make bench`: compares Sluice over HTTP with a transformers loop on the same weights, at concurrency 1, 8 and 32."""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoints import checkpoint
from bench.client.load_client import Call, Record, Target, run
from bench.client.server import served
from bench.client.summary import Summary, summarize, table, to_json
from bench.client.workloads import FIRST_ID
from bench.transformers_loop import Generator

CONCURRENCY = (1, 8, 32)
PROMPT, NEW = 128, 64


def quick(models: Sequence[str], out: Path | None, rounds: int = 2) -> str:
    """Returns the report as Markdown; writes the figures to `out` as JSON."""
    rows: dict[str, Summary] = {}
    for model in models:
        folder, vocab = _folder(model)
        # without drafts, which would profit from random weights, because these make a model repeat itself
        with served(str(folder), ["--speculation", "off"]) as target:
            for concurrency in CONCURRENCY:
                _say(f"{model}: sluice, {concurrency} at once")
                rows[f"{model}, sluice, {concurrency}"] = _sluice(target, concurrency, vocab, rounds)
        peer = Generator(folder)
        for concurrency in CONCURRENCY:
            _say(f"{model}: transformers, batch {concurrency}")
            peer.run(concurrency, 16, 2)
            rows[f"{model}, transformers, {concurrency}"] = summarize(peer.run(concurrency, PROMPT, NEW))
        del peer
    if out is not None:
        out.write_text(to_json(rows))
    return table(rows, f"{PROMPT} in, {NEW} out")


def _sluice(target: Target, concurrency: int, vocab: int, rounds: int) -> Summary:
    rng = random.Random(concurrency)

    def calls() -> list[Call]:
        return [Call(0.0, [rng.randrange(FIRST_ID, vocab) for _ in range(PROMPT)], NEW) for _ in range(concurrency)]

    best: list[Record] = []
    for _ in range(rounds + 1):  # one more, because the first round warms the server up
        records = asyncio.run(run(target, calls()))
        if not best or max(r.done for r in records) < max(r.done for r in best):
            best = records
    return summarize(best)


def _folder(model: str) -> tuple[Path, int]:
    if model == "demo":
        folder = Path(__file__).parent.parent / "deploy" / "demo" / "model"
        return folder, int(json.loads((folder / "config.json").read_text())["vocab_size"])
    return checkpoint(model), 32_000


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
