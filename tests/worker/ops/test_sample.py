import math
import random as host_random
from dataclasses import replace

import pytest
import torch

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.sampling import Row, moved_to, params_of
from worker.ops.sampling import logprobs, sample, sample_plain
from worker.ops.sampling import reference as sample_module
from worker.ops.sampling.reference import (
    EVERY,
    ONE,
    SampleParams,
    first_highest,
    logprobs_torch,
    sample_torch,
    uniform,
    wrong_draws,
)

MASK = (1 << 64) - 1


def python_uniform(seed: int, position: int) -> float:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    state = mix(seed + golden & MASK) + (position + 1) * golden & MASK
    return ((mix(state) >> 12) + 0.5) / 2**52


def naive(logits: list[float], row: Row) -> int:
    """The specification of sampling, for one row, in plain Python."""
    logits = list(logits)
    for token, count in row.history:
        value = logits[token]
        value = value / row.repetition if value > 0 else value * row.repetition
        logits[token] = value - row.frequency * count - row.presence * (count > 0)
    for token, extra in row.bias:
        logits[token] += extra
    if row.temperature == 0:
        return logits.index(max(logits))
    kept = {i: math.exp((x - max(logits)) / row.temperature) for i, x in enumerate(logits)}
    order = sorted(kept, key=lambda i: (-logits[i], i))
    if row.top_k:
        order = order[: row.top_k]
    total, reached, count = math.fsum(kept[i] for i in order), 0.0, 0
    while count == 0 or (reached < row.top_p * total and count < len(order)):
        reached += kept[order[count]]
        count += 1
    left = sorted(i for i in order[:count] if kept[i] >= row.min_p)
    target = python_uniform(row.seed, row.position) * math.fsum(kept[i] for i in left)
    for i in left:
        target -= kept[i]
        if target < 0:
            return i
    return left[-1]


def wild_row(dice: host_random.Random, width: int) -> Row:
    tokens = dice.sample(range(width), 6)
    return Row(
        temperature=dice.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=dice.choice([0, 0, 1, 2, 7, 270, width, width + 9]),
        top_p=dice.choice([1.0, 0.05, 0.37, 0.8123, 0.99]),
        min_p=dice.choice([0.0, 0.0, 0.0321, 0.4]),
        repetition=dice.choice([1.0, 1.3, 0.8]),
        presence=dice.choice([0.0, 0.7]),
        frequency=dice.choice([0.0, -0.4, 0.2]),
        seed=dice.getrandbits(64),
        position=dice.randrange(5000),
        history=tuple((t, dice.randrange(3)) for t in tokens[:3]) if dice.random() < 0.5 else (),
        bias=tuple((t, dice.choice([2.0, -3.5, -math.inf])) for t in tokens[3:]) if dice.random() < 0.5 else (),
    )


@pytest.mark.parametrize("grain", [0.0, 0.5])  # 0.5: logits full of ties
@pytest.mark.parametrize("width", [11, 300, 1000])
def test_every_row_follows_the_specification(grain: float, width: int) -> None:
    dice = host_random.Random(width)
    rows = [wild_row(dice, width) for _ in range(150)]
    logits = random(150, width) * 2
    logits = (logits / grain).round() * grain if grain else logits
    got = sample(logits, params_of(rows)).tolist()
    assert got == [naive(x, row) for x, row in zip(logits.tolist(), rows, strict=True)]


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -4.0])
    count = 40_000
    rows = [Row(seed=seed // 200, position=seed % 200) for seed in range(count)]
    drawn = sample(logits.expand(count, -1), params_of(rows))
    observed = torch.bincount(drawn, minlength=5) / count
    expected = logits.softmax(0)
    assert ((observed - expected).abs() < 4 * (expected / count).sqrt()).all()


def test_nearly_flat_distribution_reaches_every_token() -> None:
    drawn = sample(torch.zeros(4000, 64), params_of([Row(seed=seed) for seed in range(4000)]))
    assert set(drawn.tolist()) == set(range(64))


def test_greedy_takes_the_first_of_equals_beside_sampling_rows() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).repeat(2, 1)
    assert sample(logits, params_of([Row(temperature=0)] * 2)).tolist() == [1, 1]
    assert sample(logits, params_of([Row(temperature=0), Row(top_k=1)])).tolist() == [1, 1]


@pytest.mark.parametrize("width", [1, 33, 50_257])
def test_first_highest_is_the_lowest_of_equal_ids(width: int) -> None:
    logits = random(3, width).clamp(max=2.0)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert first_highest(logits).tolist() == first_highest(logits.t().contiguous().t()).tolist() == expected


def test_sample_does_not_change_logits() -> None:
    logits = random(1, 20)
    before = logits.clone()
    sample(logits, params_of([Row(history=((3, 1),), presence=2.0, bias=((4, -math.inf),), top_k=3)]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("width", [151_936, 50_257])
def test_sampled_row_does_not_depend_on_other_rows_or_threads(width: int, threads: None) -> None:
    """Compares one row alone with eight rows, for vocabularies so large that threads share reductions."""
    logits = random(8, width) * 4
    rows = [
        Row(seed=7), Row(seed=8, top_p=0.9), Row(seed=9, top_k=50), Row(seed=10, top_k=900, top_p=0.95, min_p=1e-3),
        Row(temperature=0), Row(seed=11, temperature=3.0), Row(seed=12, top_p=0.999), Row(seed=13, temperature=0.1),
    ]  # fmt: skip
    ids = torch.arange(8) * 1000
    seen = set()
    for count in (1, 3):
        torch.set_num_threads(count)
        together = sample(logits, params_of(rows))
        chosen, top_ids, top_values = logprobs(logits, ids, 5)
        seen.add((tuple(together.tolist()), tuple(chosen.tolist())))
        for r, row in enumerate(rows):
            alone = logits[r : r + 1].clone()
            assert sample(alone, params_of([row])).item() == together[r]
            assert sample_plain(alone, params_of([row]).plain).item() == together[r]
            alone_chosen, alone_ids, alone_values = logprobs(alone, ids[r : r + 1], 5)
            assert torch.equal(alone_chosen[0], chosen[r])
            assert torch.equal(alone_ids[0], top_ids[r]) and torch.equal(alone_values[0], top_values[r])
    assert len(seen) == 1


def test_skipping_unneeded_stages_changes_no_token() -> None:
    rows = [Row(seed=seed) for seed in range(50)]
    logits = random(50, 100)
    params = params_of(rows)
    assert torch.equal(sample(logits, params), sample(logits, replace(params, stages=EVERY)))


def test_uniform_is_splitmix64_on_every_seed() -> None:
    seeds = [0, 1, MASK, 1 << 63, (1 << 63) - 1, 0x123456789ABCDEF]
    for position in (0, 1, 77_777):
        signed = torch.tensor([seed - (seed >> 63 << 64) for seed in seeds])
        got = uniform(signed, torch.full((len(seeds),), position))
        assert got.tolist() == [python_uniform(seed, position) for seed in seeds]
        assert ((got > 0) & (got < 1)).all()


def test_sample_on_a_device_never_reads_back_to_the_host() -> None:
    """On the meta device, a read by the host raises an error."""
    params = params_of([Row(top_k=3, top_p=0.5, min_p=0.1, history=((1, 2),), bias=((2, 1.0),)), Row(temperature=0)])
    moved = moved_to(params, "meta")
    logits = torch.empty(2, 50, device="meta")
    assert sample(logits, moved).shape == (2,)
    assert logprobs(logits, moved.plain.positions, 4)[1].shape == (2, 4)


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = random(4, 1000) * 5
    ids = torch.tensor([0, 999, 5, 5])
    chosen, top_ids, top_values = logprobs(logits, ids, 3)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected.gather(1, ids[:, None])[:, 0], atol=3e-6, rtol=0)
    torch.testing.assert_close(top_values.double(), expected.topk(3).values, atol=3e-6, rtol=0)
    assert torch.equal(top_ids, expected.topk(3).indices)


def test_logprobs_of_many_rows_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = random(7, 50), torch.arange(7)
    whole = logprobs_torch(logits, ids, 3)
    monkeypatch.setattr("worker.ops.sampling.reference.LOGPROB_CHUNK", 100)
    assert all(torch.equal(*pair) for pair in zip(whole, logprobs_torch(logits, ids, 3), strict=True))


def test_logprobs_order_equals_by_id() -> None:
    logits = torch.tensor([[-1.0, 2.0, -3.0, 2.0, -1.0]])
    assert logprobs(logits, torch.tensor([0]), 5)[1].tolist() == [[1, 3, 0, 4, 2]]


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws_without_a_sync() -> None:
    rows = [Row(seed=seed, top_k=50, top_p=0.9) for seed in range(32)]
    logits, params = random(32, 5000), params_of(rows)
    expected = sample(logits, params)
    there = moved_to(params, "cuda")
    on_gpu = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = sample(on_gpu, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong_draws(logits, params.plain, params.stages, got.cpu(), expected).any()


def drawn_elsewhere(logits: torch.Tensor, params: SampleParams, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Draws ids as on a device whose exp differs by up to two units in the last place."""
    noise = torch.Generator().manual_seed(0)

    def otherwise(gap: torch.Tensor) -> torch.Tensor:
        units = torch.randint(-2, 3, gap.shape, generator=noise)
        return (gap.neg().exp() * (1.0 + units * 2.0**-24) * float(ONE)).long()

    with monkeypatch.context() as changed:
        changed.setattr("worker.ops.sampling.reference._integer_weights", otherwise)
        return sample_torch(logits, params.plain, params.stages)


def test_only_draws_that_rounding_cannot_explain_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 3000, 1000
    logits = torch.randn(rows // 8, width, generator=torch.Generator().manual_seed(1)).repeat(8, 1)
    kinds = [Row(), Row(top_p=0.9), Row(min_p=0.02, temperature=1.3), Row(temperature=0.0)]
    params = params_of([replace(kinds[at % 4], seed=at) for at in range(rows)])
    plain, stages = params.plain, params.stages
    points = _at_a_boundary(logits, params)
    monkeypatch.setattr("worker.ops.sampling.reference.uniform", lambda seeds, positions: points[seeds])
    expected = sample_torch(logits, plain, stages)
    elsewhere = drawn_elsewhere(logits, params, monkeypatch)
    assert int((elsewhere != expected).sum()) > rows // 20, "draws at the boundaries of tokens, so many differ"
    assert not wrong_draws(logits, plain, stages, elsewhere, expected).any()
    assert not wrong_draws(logits, plain, stages, expected, expected).any()
    other = (expected + 2) % width
    assert int(wrong_draws(logits, plain, stages, other, expected).sum()) > 0.99 * rows
    greedy = plain.temperature == 0
    assert wrong_draws(logits, plain, stages, (expected + 1) % width, expected)[greedy].all()


def _at_a_boundary(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Returns points in (0, 1) that lie exactly at the end of a token's share of the cumulative weights."""
    peak = logits.amax(-1, keepdim=True) + 0.0
    reached = sample_module._weights(peak, logits, params.plain, params.stages).cumsum(-1)
    return (reached[:, logits.shape[1] // 2].double() / reached[:, -1]).clamp(1e-9, 1 - 1e-9)
