"""The numbers of a report agree with records made by hand, and the tables show them."""

import json
import math

import pytest

from bench.client.load_client import Record
from bench.client.summary import (
    COMMON_TOKENS,
    NOTHING,
    Summary,
    aligned,
    compared,
    decode_rate,
    number,
    percentile,
    reasons,
    summarize,
    table,
    to_json,
)


def record(sent: float, stamps: list[float], counts: list[int] | None = None, **more: object) -> Record:
    counts = counts or [1] * len(stamps)
    made = Record(sent, stamps, stamps[-1] + 0.1, 100, sum(counts), counts=counts)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.01) == percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_summary_of_two_streams() -> None:
    made = summarize([record(1.0, [1.5, 2.0, 2.5]), record(2.0, [2.2, 2.4, 4.9], cached_tokens=50)])
    assert made["wall_s"] == pytest.approx(4.0)
    assert made["tokens_s"] == pytest.approx(6 / 4)
    assert made["total_s"] == pytest.approx(206 / 4)
    assert (made["ttft_p50"], made["ttft_p99"]) == pytest.approx((200, 500))
    assert (made["itl_p50"], made["itl_p99"], made["itl_max"]) == pytest.approx((500, 2500, 2500))
    assert (made["e2e_p50"], made["e2e_p95"]) == pytest.approx((1600, 3000))
    assert (made["cached_tokens"], made["hit_share"]) == (50, 25)


def test_summary_counts_only_the_failure_of_failed_requests() -> None:
    good, bad = record(0.0, [1.0, 2.0]), record(0.0, [9.0, 90.0], error="503: full")
    summed = summarize([good, bad])
    assert (summed.pop("requests"), summed.pop("failed")) == (2, 1)
    alone = summarize([good])
    assert {key: alone[key] for key in summed} == summed
    assert reasons([good, bad, bad, Record(error="gone")]) == [("503: full", 2), ("gone", 1)]


def test_summary_of_only_failures_is_nan() -> None:
    summed = summarize([Record(error="gone")])
    assert (summed["requests"], summed["failed"]) == (1, 1)
    assert all(math.isnan(summed[key]) for key in ("tokens_s", "ttft_p50", "itl_p99", "itl_max", "hit_share"))
    assert json.loads(to_json({"a": [summed]}))["a"][0]["tokens_s"] is None


def test_tokens_that_arrive_together_make_one_gap() -> None:
    """Tokens that are sent together after a stall count as one gap, so that they do not hide the stall."""
    made = record(0.0, [1.0, 1.1, 3.1], [1, 1, 4])
    assert made.gaps == pytest.approx([0.1, 2.0])
    assert made.per_token == pytest.approx(2.1 / 5)
    assert summarize([made])["itl_max"] == pytest.approx(2000)
    first = record(0.0, [1.0], [3])
    assert (first.gaps, first.ttft) == ([], 1.0)
    assert math.isnan(first.per_token)
    assert summarize([made, first])["tpot_p99"] == pytest.approx(420)


def test_decode_rate_counts_what_comes_while_all_run() -> None:
    early, late = record(0.0, [float(i) for i in range(21)]), record(0.0, [10.5 + i for i in range(12)])
    assert decode_rate([early, late]) == pytest.approx((10 + 9) / 9.5)
    assert math.isnan(decode_rate([record(0.0, [1.0, 2.0]), record(0.0, [3.0, 4.0])]))
    assert math.isnan(decode_rate([]))


def test_decode_rate_of_a_moment_is_no_rate() -> None:
    early, late = record(0.0, [float(i) for i in range(21)]), record(0.0, [13.5 + i for i in range(12)])
    assert COMMON_TOKENS == 8 and math.isnan(decode_rate([early, late]))
    assert decode_rate([early]) == pytest.approx(1.0)


def test_decode_rate_makes_up_for_events_that_do_not_tell_their_tokens() -> None:
    assert decode_rate([record(0.0, [1.0, 2.0, 3.0], completion_tokens=12)]) == pytest.approx(2 * 4 / 2.0)
    assert math.isnan(decode_rate([record(0.0, [1.0, 2.0, 3.0], completion_tokens=9)]))


def summary(**changed: float) -> Summary:
    return {**summarize([record(0.0, [1.0, 2.0])]), **changed}


def test_compared_has_a_column_a_mode_and_its_ratio_to_the_first() -> None:
    columns = {"a": summary(itl_p99=40.0), "b": summary(itl_p99=100.0), "c": summary(itl_p99=math.nan)}
    cells = compared(columns, "work", ratios=True)
    assert cells[0] == ["work", "a", "b", "ratio", "c", "ratio"]
    rows = {row[0]: row[1:] for row in cells[1:]}
    assert rows["ITL p99, ms"] == ["40", "100", "2.50", NOTHING, NOTHING]
    assert rows["failed"] == ["0", "0", NOTHING, "0", NOTHING]
    wanted = {f"{what} p{q}, ms" for what in ("TTFT", "ITL", "E2E") for q in (50, 95, 99)}
    assert rows.keys() > {*wanted, "failed", "output tokens/s", "prompt tokens cached, %"}
    assert compared({"a": summary(), "b": summary()})[0] == ["", "a", "b"]


def test_tables_are_markdown_and_straight() -> None:
    lines = aligned([["", "one"], ["long name", "1"], ["x", "12345"]]).split("\n")
    assert lines == ["|           |   one |", "| :-------- | ----: |", "| long name |     1 |", "| x         | 12345 |"]
    rows = table({"a": summary(), "b": summary()}, "what").split("\n")
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3.0, "3"), (0.123, "0.12"), (2.345, "2.3"), (99.94, "99.9"), (1234.5, "1234")]
)
def test_numbers_have_no_more_digits_than_they_mean(value: float, text: str) -> None:
    assert number(value) == text
