"""Experts on every instruction set: their results are right, and a row's result depends on no other row."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import in_pairs
from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.cpu_tiers import (
    DTYPES,
    FUNCTIONS,
    HERE,
    close,
    dtypes,
    needs_library,
    tier,  # noqa: F401
)
from tests.worker.ops.harness.experts import Sizes, made
from worker.ops.activation.reference import GATED
from worker.ops.linear import linear
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe import clear_choices, experts
from worker.ops.moe import native as experts_c
from worker.ops.moe.packed import Experts, PackedExperts, in_c
from worker.ops.moe.reference import choose_experts, experts_torch
from worker.ops.quantized_weight import E2M1, INT4, INT8, CodeMap
from worker.spec import Activation, ExpertGroups

CHOSEN = 3
FORMATS: dict[str, list[CodeMap | None]] = {
    "16 or 32 bits": [None],
    "8 bits": [INT8],
    "4 bits": [INT4],
    "MXFP4": [E2M1],
    "mixed": [INT4, None, INT8, E2M1, INT4, INT8, INT4],
}
on_every_tier = pytest.mark.usefixtures("tier")


def run(
    layer: Experts, x: Tensor, *, chosen: int = CHOSEN, activation: Activation = "silu", normalized: bool = True
) -> Tensor:
    return experts(x, layer, chosen, activation, normalized=normalized)


@needs_library
@on_every_tier
@in_pairs(FUNCTIONS | {"bias": [False, True], "kind": FORMATS}, indirect=["tier"])
def test_experts_in_c_compute_what_torch_does(kind: str, bias: bool, dtype: torch.dtype) -> None:
    # the second sizes are no multiples of panels or registers
    for sizes in (Sizes(bias=bias), Sizes(count=5, hidden=75, inner=45, bias=bias)):
        packed, plain = made(sizes, dtype, FORMATS[kind])
        x, add, gate = (
            random(40, sizes.hidden, dtype=dtype),
            random(40, sizes.hidden, dtype=dtype, seed=1),
            random(40, 1),
        )
        assert packed.gate_up.cpu is not None
        for activation in GATED:
            for normalized in (False, True):
                how = {"normalized": normalized, "add": add, "add_gate": gate}
                ours = experts(x, packed, CHOSEN, activation, **how)  # type: ignore[arg-type]
                close(ours, experts_torch(x, plain, CHOSEN, activation, **how))  # type: ignore[arg-type]
                close(experts_torch(x, packed, CHOSEN, activation, **how), ours)  # type: ignore[arg-type]


@needs_library
@on_every_tier
@in_pairs({"tier": HERE, "dtype": DTYPES, "kind": FORMATS}, indirect=["tier"])
def test_row_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype) -> None:
    sizes = Sizes(count=6, hidden=75, bias=True)
    packed, _ = made(sizes, dtype, FORMATS[kind])
    x, add, gate = (
        random(300, sizes.hidden, dtype=dtype),
        random(300, sizes.hidden, dtype=dtype, seed=1),
        random(300, 1),
    )
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()

    def of(rows: Tensor) -> Tensor:
        return experts(x[rows], packed, CHOSEN, "silu", normalized=True, add=add[rows], add_gate=gate[rows])

    whole = of(torch.arange(300))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(of(order), whole[order])
            for size in (1, 2, 5, 40, 100):
                for begin in range(0, 300, 100):
                    rows = order[begin : begin + size]
                    assert torch.equal(of(rows), whole[rows])
    finally:
        torch.set_num_threads(threads)


@needs_library
@on_every_tier
@dtypes
@pytest.mark.parametrize("kind", ["16 or 32 bits", "4 bits", "mixed"])
def test_experts_without_a_gate_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    halves, wholes = (made(Sizes(inner=inner), dtype, FORMATS[kind]) for inner in (40, 80))
    packed, plain = (
        replace(half, down=whole.down) for half, whole in zip(halves, wholes, strict=True)
    )  # fmt: skip
    for rows in (1, 30):
        x = random(rows, 96, dtype=dtype)
        ours = experts(x, packed, CHOSEN, "relu2", normalized=True, gated=False)
        close(ours, experts_torch(x, plain, CHOSEN, "relu2", normalized=True, gated=False))
        assert torch.equal(experts(x[-1:], packed, CHOSEN, "relu2", normalized=True, gated=False), ours[-1:])


def test_equal_logits_choose_the_lower_expert_first() -> None:
    numbers, weights = choose_experts(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), 4, normalized=True)
    assert numbers.tolist() == [[1, 2, 4, 0]] and weights[0, 0] == weights[0, 1] == weights[0, 2]


def loads_of(packed: Experts, x: Tensor, chosen: int) -> list[int]:
    loads = torch.zeros(packed.gate_up.cpu.count if packed.gate_up.cpu else 0, dtype=torch.int64)
    counting = Experts(packed.router, packed.gate_up, packed.down, loads)
    assert torch.equal(run(counting, x, chosen=chosen), run(packed, x, chosen=chosen))
    run(counting, x[:1], chosen=chosen)
    result: list[int] = loads.tolist()
    return result


@needs_library
@on_every_tier
@dtypes
def test_equal_logits_choose_the_lower_experts_in_c(dtype: torch.dtype) -> None:
    packed, plain = made(Sizes(), dtype, [None], router=torch.zeros(8, 96))
    x = random(7, 96, dtype=dtype)
    close(run(packed, x), run(plain, x))
    assert loads_of(packed, x, CHOSEN) == [8, 8, 8, 0, 0, 0, 0, 0]
    negative = made(Sizes(), dtype, [None], router=torch.full((8, 96), -0.0))[0]  # -0 equals 0
    assert loads_of(negative, x.abs(), CHOSEN) == [8, 8, 8, 0, 0, 0, 0, 0]


@needs_library
@on_every_tier
@dtypes
def test_all_rows_to_one_expert_and_none_to_another(dtype: torch.dtype) -> None:
    router = torch.zeros(8, 96)
    router[5], router[2] = 1.0, -1.0
    packed, plain = made(Sizes(), dtype, [INT4], router=router)
    x = random(50, 96, dtype=dtype).abs()
    close(run(packed, x, chosen=1), run(plain, x, chosen=1))
    assert loads_of(packed, x, 1) == [0, 0, 0, 0, 0, 51, 0, 0]
    assert loads_of(packed, x, 7) == [51, 51, 0, 51, 51, 51, 51, 51]


@needs_library
@on_every_tier
@dtypes
@pytest.mark.parametrize("count", [1, 8])
def test_every_expert_chosen(count: int, dtype: torch.dtype) -> None:
    packed, plain = made(Sizes(count=count), dtype, [INT8])
    x = random(20, 96, dtype=dtype)
    for normalized in (False, True):
        ours = run(packed, x, chosen=count, normalized=normalized)
        close(ours, run(plain, x, chosen=count, normalized=normalized))
        assert torch.equal(run(packed, x[3:4], chosen=count, normalized=normalized), ours[3:4])


@needs_library
@on_every_tier
@dtypes
def test_choice_in_c_is_that_of_torch(dtype: torch.dtype) -> None:
    packed, _ = made(Sizes(count=64, hidden=64, inner=32), dtype, [None])
    x = random(200, 64, dtype=dtype)
    numbers, _ = choose_experts(linear(x, packed.router, fp32_out=True), 6, normalized=True)
    loads = torch.zeros(64, dtype=torch.int64)
    run(Experts(packed.router, packed.gate_up, packed.down, loads), x, chosen=6)
    assert torch.equal(loads, numbers.flatten().bincount(minlength=64))


@needs_library
@on_every_tier
@dtypes
@pytest.mark.parametrize("normalized", [False, True])
def test_nan_in_a_row_stays_in_that_row(normalized: bool, dtype: torch.dtype) -> None:
    packed, plain = made(Sizes(), dtype, [INT4])
    x = random(9, 96, dtype=dtype)
    broken = x.clone()
    broken[4, 3], broken[6, 5] = torch.nan, torch.inf
    for layer in (packed, plain):
        ours, sound = run(layer, broken, normalized=normalized), run(layer, x, normalized=normalized)
        assert ours[[4, 6]].isnan().all() and not ours[[0, 1, 2, 3, 5, 7, 8]].isnan().any()
        if layer is packed:
            assert torch.equal(ours[[0, 1, 2, 3, 5, 7, 8]], sound[[0, 1, 2, 3, 5, 7, 8]])


@needs_library
@on_every_tier
def test_no_rows_give_no_rows() -> None:
    packed, _ = made(Sizes(), torch.float32, [INT4])
    assert run(packed, torch.empty(0, 96)).shape == (0, 96)


def test_choice_is_clear_unless_rounding_could_change_it() -> None:
    logits = torch.tensor([[5.0, 3.0, 1.0], [5.0, 3.0, 2.9999], [5.0, 5.0, 1.0], [-8.0, 0.1, 0.099]])
    router = PackedLinear(logits.T.contiguous(), None, True)  # so that rows of an identity matrix have these logits
    empty = PackedExperts(torch.empty(0), None)
    layer, h = Experts(router, empty, empty), torch.eye(4)
    assert clear_choices(h, layer, 2).tolist() == [True, False, True, True]
    assert clear_choices(h, layer, 1).tolist() == [True, True, False, False]
    assert clear_choices(h, layer, 3).all()


SCORES: list[dict[str, Any]] = [{}, {"scales": torch.full((8,), 1.7)}, {"choice_bias": random(8, seed=4)}]


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("how", SCORES, ids=["plain", "scaled", "biased"])
def test_scores_are_those_of_the_definition(how: dict[str, Any], normalized: bool, sigmoid: bool) -> None:
    """The oracle is DeepSeek-V3's router in float64, or ERNIE's with a softmax: the bias changes the choice of experts,
    but not their weights."""
    logits = random(40, 8, seed=2) * 3
    numbers, weights = choose_experts(logits, 3, normalized=normalized, sigmoid=sigmoid, **how)
    powers = logits.double().exp()
    scores = powers / (1 + powers if sigmoid else powers.sum(1, keepdim=True))
    compared = scores + how.get("choice_bias", torch.zeros(8)).double()
    for row, (chosen, shares) in enumerate(zip(numbers.tolist(), weights.double(), strict=True)):
        assert chosen == sorted(range(8), key=lambda expert: -float(compared[row, expert]))[:3]
        expected = (
            scores[row, chosen] / (scores[row, chosen].sum() if normalized else 1) * float(how.get("scales", [1])[0])
        )
        torch.testing.assert_close(shares, expected, rtol=1e-6, atol=1e-7)


def test_sigmoids_that_are_all_zero_give_weights_of_zero() -> None:
    assert choose_experts(torch.full((1, 4), -200.0), 2, normalized=True, sigmoid=True)[1].tolist() == [[0.0, 0.0]]


GROUPS: dict[str, tuple[ExpertGroups, dict[str, Any]]] = {
    "best softmax": (ExpertGroups(4, 2, 1), {}),
    "two softmaxes": (ExpertGroups(2, 1, 2), {}),
    "two sigmoids": (ExpertGroups(4, 2, 2), {"sigmoid": True}),
    "two biased sigmoids": (ExpertGroups(4, 3, 2), {"sigmoid": True, "choice_bias": random(8, seed=4)}),
    "one biased sigmoid": (ExpertGroups(8, 5, 1), {"sigmoid": True, "choice_bias": random(8, seed=4)}),
}


def in_groups(row: list[float], bias: list[float], groups: ExpertGroups, *, sigmoid: bool) -> tuple[set[int], bool]:
    """Returns the three experts that a row chooses, by the definition in float64, and whether groups changed them."""
    total = sum(math.exp(logit) for logit in row)
    scores = [1 / (1 + math.exp(-logit)) if sigmoid else math.exp(logit) / total for logit in row]
    compared, size = [score + more for score, more in zip(scores, bias, strict=True)], 8 // groups.count
    parts = [range(begin, begin + size) for begin in range(0, 8, size)]
    best = sorted(parts, key=lambda part: -sum(sorted((compared[i] for i in part), reverse=True)[: groups.best]))
    allowed = [expert for part in best[: groups.chosen] for expert in part]
    chosen = set(sorted(allowed, key=lambda expert: -compared[expert])[:3])
    return chosen, chosen != set(sorted(range(8), key=lambda expert: -compared[expert])[:3])


@pytest.mark.parametrize("name", GROUPS)
def test_experts_of_groups_are_those_of_the_definition(name: str) -> None:
    groups, how = GROUPS[name]
    logits = random(60, 8, seed=3) * 3
    numbers, weights = choose_experts(logits, 3, normalized=True, groups=groups, **how)
    bias = how.get("choice_bias", torch.zeros(8)).tolist()
    found = [in_groups(row, bias, groups, sigmoid=how.get("sigmoid", False)) for row in logits.double().tolist()]
    assert [set(row) for row in numbers.tolist()] == [chosen for chosen, _ in found]
    changed = sum(changed for _, changed in found)
    assert changed > 5 or groups.count == 8, "groups that change no choice prove little"
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(60))


def test_of_equal_groups_the_first_is_chosen() -> None:
    groups, logits = ExpertGroups(4, 2, 2), torch.zeros(1, 8)
    assert choose_experts(logits, 3, normalized=True, sigmoid=True, groups=groups)[0].tolist() == [[0, 1, 2]]


@needs_library
@on_every_tier
@dtypes
@pytest.mark.parametrize("name", GROUPS)
def test_experts_of_groups_in_c_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    groups, how = GROUPS[name]
    options, router = {one: how[one] for one in how if one != "choice_bias"}, random(8, 96, seed=7)
    both = [replace(one, choice_bias=how.get("choice_bias")) for one in made(Sizes(), dtype, [None], router=router)]
    x = random(60, 96, dtype=dtype)

    def run_with(layer: Experts, rows: Tensor) -> Tensor:
        return experts(rows, layer, 3, "silu", normalized=True, groups=groups, **options)

    ours, theirs = (run_with(one, x) for one in both)
    clear = clear_choices(x, both[1], 3, groups=groups, sigmoid=options.get("sigmoid", False))
    assert clear.sum() > 30
    close(ours[clear], theirs[clear])
    assert torch.equal(ours[:9], torch.cat([run_with(both[0], x[i : i + 1]) for i in range(9)]))


@needs_library
@on_every_tier
@dtypes
@pytest.mark.parametrize("how", SCORES, ids=["plain", "scaled", "biased"])
def test_scores_in_c_are_those_of_torch(how: dict[str, Any], dtype: torch.dtype) -> None:
    both = [replace(layer, **how) for layer in made(Sizes(), dtype, [None])]
    x = random(30, 96, dtype=dtype)
    for normalized, sigmoid in product((False, True), repeat=2):
        scores: dict[str, Any] = {"normalized": normalized, "sigmoid": sigmoid}
        ours, theirs = (experts(x, layer, CHOSEN, "silu", **scores) for layer in both)
        close(ours, theirs)
        alone = experts(x[4:5], both[0], CHOSEN, "silu", **scores)
        assert torch.equal(alone, ours[4:5])


@needs_library
@pytest.mark.parametrize("normalized", [False, True])
def test_exponentials_are_finite_if_a_bias_chooses_an_unlikely_expert_first(normalized: bool) -> None:
    """The logits are so far apart that the exponential of their difference would be infinite."""
    layer = replace(made(Sizes(), torch.float32, [None])[0], choice_bias=torch.tensor([9.0, 8.0, *[0.0] * 6]))
    packed = in_c(layer, 3, "silu", normalized=normalized)
    assert packed is not None
    logits = torch.tensor([[-100.0, 0.0, 100.0, 99.0, 1.0, 2.0, 3.0, 4.0]])
    numbers, weights = experts_c.choose(logits, packed)
    expected, shares = choose_experts(logits, 3, normalized=normalized, choice_bias=layer.choice_bias)
    assert numbers.tolist() == expected.tolist() == [[0, 1, 2]] and weights.isfinite().all()
    torch.testing.assert_close(weights, shares)
