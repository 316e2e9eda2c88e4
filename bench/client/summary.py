"""Computes throughput and latency percentiles from records, as a dict for JSON and as Markdown tables."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.client.load_client import Record

Summary = dict[str, float]
COMMON_TOKENS = 8  # minimum of tokens per stream for `decode_rate`
NOTHING = "\N{EN DASH}"  # shown for a figure that could not be measured

SHORT = {
    "requests": "requests",
    "failed": "failed",
    "tokens_s": "tokens/s",
    "decode_s": "decode tokens/s",
    "ttft_p50": "TTFT p50 ms",
    "ttft_p99": "p99",
    "itl_p50": "ITL p50 ms",
    "itl_p99": "p99",
    "e2e_p50": "E2E p50 ms",
    "e2e_p99": "p99",
}
LONG = {
    "requests": "requests",
    "failed": "failed",
    "tokens_s": "output tokens/s",
    "total_s": "input + output tokens/s",
    "hit_share": "prompt tokens cached, %",
    **{f"{name}_p{q}": f"{name.upper()} p{q}, ms" for name in ("ttft", "itl", "e2e") for q in (50, 95, 99)},
    "itl_max": "ITL longest, ms",
    "tpot_p50": "time per output token p50, ms",
    "tpot_p99": "time per output token p99, ms",
}


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the quantile `q` by nearest rank, or nan if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def summarize(records: Sequence[Record]) -> Summary:
    """Returns times in ms, rates in tokens per second of wall clock, and shares in percent. Failed requests are only
    counted."""
    good = [record for record in records if not record.error]
    wall = max((r.done for r in good), default=0.0) - min((r.sent for r in good), default=0.0)
    gaps = [gap for record in good for gap in record.gaps]
    ttft = [record.ttft for record in good]
    tpot = [each for record in good if not math.isnan(each := record.per_token)]
    e2e = [record.done - record.sent for record in good]
    new, prompt = sum(r.completion_tokens for r in good), sum(r.prompt_tokens for r in good)
    cached = sum(r.cached_tokens for r in good)
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "wall_s": wall,
        "tokens_s": new / wall if wall else math.nan,
        "total_s": (new + prompt) / wall if wall else math.nan,
        "decode_s": decode_rate(good),
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "cached_tokens": cached,
        "hit_share": 100 * cached / prompt if prompt else math.nan,
        **{
            f"{name}_p{q}": 1e3 * percentile(values, q / 100)
            for name, values in (("ttft", ttft), ("itl", gaps), ("e2e", e2e), ("tpot", tpot))
            for q in (50, 95, 99)
        },
        "itl_max": 1e3 * max(gaps, default=math.nan),
    }


def decode_rate(records: Sequence[Record]) -> float:
    """Returns tokens per second while every stream runs: after the last stream's first token, before the first stream's
    end. Returns nan if some stream had fewer than COMMON_TOKENS in that time, which would be too short for a rate."""
    begun = max((r.stamps[0] for r in records), default=0.0)
    ended = min((r.stamps[-1] for r in records), default=0.0)
    if ended <= begun:
        return math.nan
    inside = [
        weight(record) * sum(n for stamp, n in zip(record.stamps, record.tokens, strict=True) if begun < stamp <= ended)
        for record in records
    ]
    return sum(inside) / (ended - begun) if min(inside) >= COMMON_TOKENS else math.nan


def weight(record: Record) -> float:
    """Returns the number of tokens in the answer, divided by the number of tokens counted as they arrived. The result
    is 1 unless the server does not report how many tokens an event has."""
    return record.completion_tokens / sum(record.tokens)


def reasons(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Returns the reasons why requests failed, each with its count, most frequent first."""
    return Counter(record.error for record in records if record.error).most_common()


def table(rows: Mapping[str, Summary], first: str = "") -> str:
    """Returns a Markdown table with one row per name."""
    lines = [f"| {first} | " + " | ".join(SHORT.values()) + " |", "|---" + "|--:" * len(SHORT) + "|"]
    lines += [f"| {name} | " + " | ".join(number(row[column]) for column in SHORT) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def compared(columns: Mapping[str, Summary], first: str = "", *, ratios: bool = False) -> list[list[str]]:
    """Returns the cells of a table with one column per name and one row per figure.

    ratios: whether each name after the first gets a second column, with its ratios to the first name's figures.
    """
    names = list(columns)
    base = columns[names[0]]
    lines = [[first, names[0]]]
    lines += [[title, number(base[key])] for key, title in LONG.items()]
    for name in names[1:]:
        lines[0] += [name, "ratio"] if ratios else [name]
        for line, key in zip(lines[1:], LONG, strict=True):
            value = columns[name][key]
            line += [number(value), _ratio(value, base[key])] if ratios else [number(value)]
    return lines


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are aligned in the source text; the first line of `cells` is the head."""
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*cells, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join([row[0].ljust(widths[0]), *rest]) + " |")
    return "\n".join(lines)


def to_json(value: Any) -> str:
    """Returns JSON, with null for figures that could not be measured."""
    return json.dumps(_finite(value), indent=1)


def number(value: float) -> str:
    if math.isnan(value):
        return NOTHING
    if value == int(value) or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base and not math.isnan(value / base) else NOTHING


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list():
            return [_finite(item) for item in value]
        case _:
            return value
