"""The scenarios: the requests sent to every server, and the figures computed from their records.

Prompts are random texts, all different, with an exact number of tokens by the checkpoint's tokenizer.
"""

import asyncio
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan

from tokenizers import Tokenizer

from bench.client.load_client import NO_DONE, Call, Record, Target, run
from bench.client.summary import COMMON_TOKENS, percentile, summarize

Figures = dict[str, float]

PROMPT, NEW, LONG = 128, 64, 1024
# Each further stream lengthens all outputs by this, so that no stream ends before the last prompt is computed.
NEW_PER_STREAM = 4
TEMPLATE = 8  # tokens that a server may add to a prompt
ARRIVALS, EVERY_S, RUNNING = 6, 1.5, 4


class Prompts:
    """Makes random texts with an exact number of tokens. Texts of different seeds share no prefix."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def text(self, tokens: int) -> str:
        ids = [self._random.randrange(300, self._tokenizer.get_vocab_size()) for _ in range(2 * tokens)]
        words = " ".join(self._tokenizer.decode([id]).strip() for id in ids if self._tokenizer.decode([id]).isascii())
        encoding = self._tokenizer.encode(words, add_special_tokens=False)
        return words[: encoding.offsets[tokens - 1][1]]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    calls: Callable[[Prompts], list[Call]]
    figures: Callable[[list[Record]], Figures]

    def run(self, target: Target, prompts: Prompts) -> Figures:
        """Runs the scenario. Figures that could not be measured are nan."""
        records = asyncio.run(run(target, self.calls(prompts)))
        # A missing [DONE] after output is no failure: some servers never send it.
        failed = [r.error for r in records if r.error and not (r.stamps and r.error == NO_DONE)]
        for record in records:
            record.error = ""
        if failed:
            print(f"{target.url}: {failed[0]}", file=sys.stderr)
        return {f"{self.name}: failed": float(len(failed))} if failed else self.figures(records)


def scenarios() -> list[Scenario]:
    return [
        Scenario("prefill", _prefill_calls, _prefill),
        *(_concurrent(n) for n in (1, 8, 32)),
        Scenario("arrivals", _arriving_calls, _decode_gaps),
    ]


def _prefill_calls(prompts: Prompts) -> list[Call]:
    return [Call(0.0, prompts.text(LONG), 2)]


def _prefill(records: list[Record]) -> Figures:
    ttft = records[0].ttft
    return {f"prefill of {LONG} tokens, tokens/s": LONG / ttft if ttft > 0 else nan}


def _concurrent(count: int) -> Scenario:
    def calls(prompts: Prompts) -> list[Call]:
        return [Call(0.0, prompts.text(PROMPT), NEW + NEW_PER_STREAM * (count - 1)) for _ in range(count)]

    def figures(records: list[Record]) -> Figures:
        summary = summarize(records)
        if isnan(summary["decode_s"]):
            reason = f"some stream had fewer than {COMMON_TOKENS} tokens while all {count} ran"
            print(f"decode at {count} is not measured: {reason}", file=sys.stderr)
        return {
            f"decode at {count}, tokens/s": summary["decode_s"],
            f"all at {count}, tokens/s": summary["tokens_s"],
            f"TTFT p50 at {count}, ms": summary["ttft_p50"],
            f"ITL p50 at {count}, ms": summary["itl_p50"],
            f"ITL p99 at {count}, ms": summary["itl_p99"],
            f"longest ITL at {count}, ms": summary["itl_max"],
        }

    return Scenario(f"decode{count}", calls, figures)


def at_depth(depth: int) -> Scenario:
    """Returns the scenario of one stream whose context has `depth` tokens at its end, as K/V slows decoding down."""
    prompt = max(PROMPT, depth - NEW - TEMPLATE)
    name = f"decode at a depth of {depth or PROMPT}, tokens/s"

    def figures(records: list[Record]) -> Figures:
        seconds = records[0].per_token
        return {name: 1 / seconds if seconds > 0 else nan}

    return Scenario(f"depth {depth}", lambda prompts: [Call(0.0, prompts.text(prompt), NEW)], figures)


def _arriving_calls(prompts: Prompts) -> list[Call]:
    """Returns calls for RUNNING streams, and long prompts that arrive while these streams run."""
    running = [Call(0.0, prompts.text(PROMPT), 2 * NEW) for _ in range(RUNNING)]
    return running + [Call((i + 1) * EVERY_S, prompts.text(LONG), 4) for i in range(ARRIVALS)]


def _decode_gaps(records: list[Record]) -> Figures:
    gaps = [gap for record in records[:RUNNING] for gap in record.gaps]
    return {
        "ITL p50 while long prompts arrive, ms": 1e3 * percentile(gaps, 0.5),
        "ITL p99 while long prompts arrive, ms": 1e3 * percentile(gaps, 0.99),
    }


def pooled(rounds: list[Figures]) -> Figures:
    """Returns the median of each figure over the rounds that measured it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: _median([figures.get(name, nan) for figures in rounds]) for name in names}


def _median(values: list[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.median(known) if known else nan
