"""From records to numbers: throughput and latency percentiles, as a dict for JSON and a row for a table."""

import math
from collections.abc import Sequence

from bench.client import Record

COLUMNS = (
    "requests",
    "failed",
    "tokens_s",
    "decode_s",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "e2e_p50",
    "e2e_p99",
)
TITLES = (
    "requests",
    "failed",
    "tokens/s",
    "decode tokens/s",
    "TTFT p50 ms",
    "p99",
    "ITL p50 ms",
    "p99",
    "E2E p50 ms",
    "p99",
)


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest rank; nan for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """Times in milliseconds, rates in completion tokens per second of wall clock."""
    good = [record for record in records if not record.error]
    wall = max((r.done for r in good), default=0.0) - min((r.sent for r in good), default=0.0)
    gaps = [gap for record in good for gap in record.gaps]
    ttft = [record.ttft for record in good]
    e2e = [record.done - record.sent for record in good]
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "tokens_s": sum(r.completion_tokens for r in good) / wall if wall else math.nan,
        "decode_s": decode_rate(good),
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "cached_tokens": sum(r.cached_tokens for r in good),
        **{
            f"{name}_p{q}": 1e3 * percentile(values, q / 100)
            for name, values in (("ttft", ttft), ("itl", gaps), ("e2e", e2e))
            for q in (50, 95, 99)
        },
    }


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens per second while every stream runs: from the last first token to the first end."""
    begun = max((r.stamps[0] for r in records), default=0.0)
    ended = min((r.stamps[-1] for r in records), default=0.0)
    if ended <= begun:
        return math.nan
    per_event = sum(r.completion_tokens for r in records) / sum(len(r.stamps) for r in records)
    inside = sum(begun < stamp <= ended for r in records for stamp in r.stamps)
    return per_event * inside / (ended - begun)


def table(rows: dict[str, dict[str, float]], first: str = "") -> str:
    """A Markdown table, a row a name."""
    lines = [f"| {first} | " + " | ".join(TITLES) + " |", "|---" + "|--:" * len(TITLES) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(_number(row[column]) for column in COLUMNS) + " |")
    return "\n".join(lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
