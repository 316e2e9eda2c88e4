"""Measures a frontend's text processing: detokenizing, stop strings, and encoding on the event loop or in a thread.

    python -m bench.micro.text CHECKPOINT_FOLDER

Prints µs per token (best of several runs, one thread) for a long text, tokenized with the checkpoint's tokenizer.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from frontend.text.detokenizer import OutputText
from frontend.text.stop_strings import Stops
from frontend.text.tokenizer import Tokenizer

PROSE = "The quick brown fox jumps over the lazy dog, twice; then it rests: why not? Größe, naïve café 日本語 😀.\n"
TEXTS = {"mixed": PROSE, "ascii": PROSE[:70] + "\n", "wide": "😀👩‍👩‍👧日本語", "stops": "#U#U\n"}
STOPS = ["\n\nUser:", "<|im_end|>", "Question:", "###"]
MANY = [*STOPS, *(f"{letter}{letter}zz" for letter in "etaoinshrdlu")]


def best(work: Callable[[], object], rounds: int = 7) -> float:
    """Returns the seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def stream(tokenizer: Tokenizer, ids: list[int], batch: int, stops: list[str]) -> Callable[[], None]:
    """Returns a function that detokenizes one stream of `ids`, in batches of `batch` ids."""
    pushes = [ids[start : start + batch] for start in range(0, len(ids), batch)]
    automaton = Stops(stops) if stops else None

    def work() -> None:
        text = OutputText(tokenizer.detokenizer(), automaton)
        for push in pushes:
            text.push(push)
        text.finish()

    return work


def report_streams(tokenizer: Tokenizer) -> None:
    for name, prose in TEXTS.items():
        ids = tokenizer.encode_now([prose * 400], add_special_tokens=False)[0][:10_000]
        for label, stops in (("no stops", []), ("4 stops", STOPS), ("16 stops", MANY)):
            costs = [best(stream(tokenizer, ids, batch, stops)) / len(ids) * 1e6 for batch in (1, 4, 16, 256)]
            print(f"{name:7} {label:9} µs/token at 1, 4, 16, 256 a push:", *(f"{cost:.2f}" for cost in costs))


async def spin() -> None:
    """Keeps the event loop busy, a millisecond at a time, as streams do."""
    while True:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)


async def other_thread(tokenizer: Tokenizer, texts: list[str], rounds: int) -> float:
    """Returns the median seconds in which another thread encodes the texts, until the event loop has the ids."""
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        await loop.run_in_executor(None, tokenizer.encode_now, texts)
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


async def report_encoding(tokenizer: Tokenizer) -> None:
    for chars in (100, 1_000, 4_000, 16_000):
        texts = [(PROSE * (chars // len(PROSE) + 1))[:chars]]
        here = best(partial(tokenizer.encode_now, texts), 30)
        idle = await other_thread(tokenizer, texts, 30)
        spinner = asyncio.create_task(spin())
        busy = await other_thread(tokenizer, texts, 30)
        spinner.cancel()
        print(f"encode {chars:6} chars, ms: here {here * 1e3:.2f}, on a thread {idle * 1e3:.2f}, busy {busy * 1e3:.2f}")


if __name__ == "__main__":
    checkpoint = Tokenizer.load(Path(sys.argv[1]))
    report_streams(checkpoint)
    asyncio.run(report_encoding(checkpoint))
