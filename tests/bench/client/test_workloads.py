"""The workloads match their descriptions, are the same every time, and can be scaled."""

from itertools import pairwise

import pytest

from bench.client.load_client import Call
from bench.client.workloads import FIRST_ID, VOCAB, WORKLOADS, Scale, chosen

PLAIN = Scale()


def made(name: str, scale: Scale = PLAIN) -> list[Call]:
    return WORKLOADS[name].make(VOCAB, scale)


def lengths(calls: list[Call]) -> list[int]:
    return [len(call.prompt) for call in calls]


def within(values: list[int], low: int, high: int) -> bool:
    """Asserts that all values lie in the range, and that the values cover most of the range."""
    return low <= min(values) and max(values) <= high and max(values) - min(values) > (high - low) * 0.7


def test_baseline_is_ten_equal_ones_one_after_another() -> None:
    calls = made("baseline")
    assert [(len(call.prompt), call.max_tokens) for call in calls] == [(256, 256)] * 10
    assert [name for name, workload in WORKLOADS.items() if workload.sequential] == ["baseline"]


def test_continuous_batching_is_32_at_4_a_second() -> None:
    calls = made("continuous_batching")
    assert [call.at for call in calls] == [index / 4 for index in range(32)]
    assert within(lengths(calls), 64, 512)
    assert within([call.max_tokens for call in calls], 64, 256)


@pytest.mark.parametrize(
    ("name", "count", "prompt", "new"),
    [
        ("mixed", 16, (32, 1024), (64, 256)),
        ("paged_attention", 48, (128, 384), (128, 256)),
        ("offline", 256, (100, 1024), (100, 1024)),
    ],
)
def test_bursts_come_at_once(name: str, count: int, prompt: tuple[int, int], new: tuple[int, int]) -> None:
    calls = made(name)
    assert [call.at for call in calls] == [0.0] * count
    assert within(lengths(calls), *prompt)
    assert within([call.max_tokens for call in calls], *new)


def test_chunked_prefill_has_long_prompts_and_poisson_arrivals() -> None:
    calls = made("chunked_prefill")
    assert len(calls) == 48
    waits = [b.at - a.at for a, b in pairwise(calls)]
    mean = sum(waits) / len(waits)
    assert 1 / 8 < mean < 1 / 4.5
    deviation = (sum((wait - mean) ** 2 for wait in waits) / len(waits)) ** 0.5
    assert 0.6 < deviation / mean < 1.4, "exponential waits vary as much as they last"
    long, short = ([n for n in lengths(calls) if (n > 500) == side] for side in (True, False))
    assert within(long, 1024, 2048)
    assert all(64 <= n <= 128 for n in short)
    assert 0.6 < len(long) / 48 < 0.9
    assert within([call.max_tokens for call in calls], 64, 256)


def test_prefix_caching_shares_1024_tokens_and_nothing_else() -> None:
    calls = made("prefix_caching")
    assert [call.at for call in calls] == [index / 8 for index in range(48)]
    assert len({tuple(call.prompt[:1024]) for call in calls}) == 1
    assert len({tuple(call.prompt[1024:1056]) for call in calls}) == 48
    assert within(lengths(calls), 1024 + 32, 1024 + 128)
    assert {call.max_tokens for call in calls} == {256}


@pytest.mark.parametrize("name", sorted({*WORKLOADS} - {"prefix_caching"}))
def test_other_prompts_share_no_page(name: str) -> None:
    calls = made(name)
    assert len({tuple(call.prompt[:16]) for call in calls}) == len(calls)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_deterministic_with_valid_ids(name: str) -> None:
    calls = made(name)
    assert calls == made(name)
    ids = [token for call in calls for token in call.prompt]
    assert all(isinstance(token, int) and FIRST_ID <= token < VOCAB for token in ids)


@pytest.mark.parametrize("name", WORKLOADS)
def test_scales_change_speed_and_lengths_only(name: str) -> None:
    calls, scaled = made(name), made(name, Scale(rate=2.0, length=0.1))
    assert len(scaled) == len(calls)
    assert all(call.max_tokens >= 1 and call.prompt for call in made(name, Scale(length=0.0001)))
    for call, small in zip(calls, scaled, strict=True):
        assert small.max_tokens == pytest.approx(call.max_tokens / 10, abs=0.51)
        assert len(small.prompt) == pytest.approx(len(call.prompt) / 10, abs=1.01)
    assert [small.at for small in scaled] == pytest.approx([call.at / 2 for call in calls])


@pytest.mark.parametrize("name", WORKLOADS)
def test_warm_up_is_two_calls_of_the_same_size_without_shared_prefix(name: str) -> None:
    calls = made(name)
    warm = WORKLOADS[name].warm_up(calls)
    assert [(len(call.prompt), call.max_tokens) for call in warm] == [(len(c.prompt), c.max_tokens) for c in calls[:2]]
    assert not {tuple(call.prompt[:16]) for call in warm} & {tuple(call.prompt[:16]) for call in calls}


def test_workloads_are_chosen_by_name() -> None:
    assert chosen("all") == list(WORKLOADS.values())
    assert [workload.name for workload in chosen("offline,baseline")] == ["offline", "baseline"]
    with pytest.raises(KeyError, match="nonsense"):
        chosen("baseline,nonsense")
