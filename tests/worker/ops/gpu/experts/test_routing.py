"""The kernels choose the same experts as plain PyTorch, and each slot is in exactly one tile of its expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import poisoned, random
from worker.ops.moe.reference import choose_experts
from worker.spec import ExpertGroups

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def chosen(logits: Tensor, count: int, *, normalized: bool = True) -> tuple[Tensor, Tensor]:
    from worker.ops.moe.triton_routing import choose_experts_triton

    with poisoned():
        return choose_experts_triton(logits, count, normalized=normalized)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(1, 1), (4, 4), (6, 2), (32, 4), (60, 7), (128, 8), (300, 10)])
def test_choice_agrees_with_torch(experts: int, count: int, normalized: bool, device: str) -> None:
    logits = (random(9, experts + 3, device=device) * 3)[:, :experts]  # strided
    logits[1] = logits[1].round()  # many equal logits
    logits[2] = 0.0
    logits[3, ::2] = -torch.inf
    numbers, weights = chosen(logits, count, normalized=normalized)
    expected, shares = choose_experts(logits, count, normalized=normalized)
    assert torch.equal(numbers.long(), expected)
    torch.testing.assert_close(weights, shares, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("biased", "sigmoid"), [(True, True), (False, True), (True, False)])
def test_choice_by_scores_agrees_with_torch(biased: bool, sigmoid: bool, normalized: bool, device: str) -> None:
    from worker.ops.moe.triton_routing import choose_experts_triton

    logits = random(9, 33, device=device) * 3
    logits[3] *= 1 if sigmoid else 100  # the exponential of a difference of logits is infinite
    logits[2] = -80.0  # the sum of the sigmoids is less than the constant added to it
    how: dict[str, Any] = {"sigmoid": sigmoid, "scales": torch.full((33,), 2.5, device=device)}
    how["choice_bias"] = random(33, seed=5, device=device) if biased else None
    with poisoned():
        numbers, weights = choose_experts_triton(logits, 6, normalized=normalized, **how)
    expected, shares = choose_experts(logits, 6, normalized=normalized, **how)
    assert torch.equal(numbers.long(), expected)
    torch.testing.assert_close(weights, shares, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "biased"])
@pytest.mark.parametrize(("count", "of_groups", "best"), [(4, 2, 1), (3, 1, 2), (8, 5, 2)])
def test_choice_from_groups_agrees_with_torch(kind: str, count: int, of_groups: int, best: int, device: str) -> None:
    from worker.ops.moe.triton_routing import choose_experts_triton

    logits = random(9, 24, seed=6, device=device) * 3
    logits[2] = 0.0  # equal groups of equal experts
    how: dict[str, Any] = {"sigmoid": kind != "softmax", "groups": ExpertGroups(count, of_groups, best)}
    how["choice_bias"] = random(24, seed=5, device=device) if kind == "biased" else None
    with poisoned():
        numbers, weights = choose_experts_triton(logits, 5, normalized=False, **how)
    expected, shares = choose_experts(logits, 5, normalized=False, **how)
    assert torch.equal(numbers.long(), expected)
    torch.testing.assert_close(weights, shares, rtol=1e-6, atol=1e-7)


def test_of_equal_logits_the_lower_number_comes_first(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0]], device=device)
    assert chosen(logits, 5)[0].tolist() == [[1, 3, 0, 2, 4]]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_numbers_exist_and_differ_whatever_the_logits_are(wrong: float, device: str) -> None:
    logits = torch.stack((torch.full((5,), wrong), random(5), random(5))).to(device)
    logits[1, 2] = wrong
    numbers, weights = chosen(logits, 3)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in numbers.tolist())
    assert not weights[0].isfinite().any() and weights[2].isfinite().all()


def test_a_choice_does_not_depend_on_the_other_rows(device: str) -> None:
    logits = random(20, 32, device=device)
    whole = chosen(logits, 4)
    for row in (0, 7, 19):
        alone = chosen(logits[row : row + 1], 4)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))


NUMBERS = {
    "random": torch.randint(0, 6, (50, 2), generator=torch.Generator().manual_seed(1)),
    "one expert": torch.full((70, 1), 3),
    "the last expert": torch.full((33, 1), 5),
    "whole tiles": torch.arange(6).repeat_interleave(32)[:, None],
    "one row": torch.tensor([[4, 1]]),
    "many": torch.randint(0, 6, (1500, 3), generator=torch.Generator().manual_seed(2)),  # more than a block of slots
}


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_every_slot_is_in_one_tile_of_its_expert(numbers: Tensor, rows: int, device: str) -> None:
    from worker.ops.moe.triton_routing import group_slots_triton

    with poisoned():
        groups = group_slots_triton(numbers.int().to(device), 6, rows, is_sorted=True)
    order, flat = groups.order.tolist(), numbers.flatten()
    assert order == flat.argsort(stable=True).tolist(), "each expert's slots are in ascending order"
    found = []
    for expert, first, count in groups.table.tolist():
        assert 0 <= count <= rows and 0 <= expert < 6
        slots = order[first : first + count]
        assert all(flat[slot] == expert for slot in slots)
        found += slots
    assert found == order and len(groups.table) == groups.tiles == len(flat) // rows + 6


def test_slots_that_are_not_grouped_are_tiles() -> None:
    from worker.ops.moe.triton_routing import group_slots_triton

    groups = group_slots_triton(torch.zeros(3, 4, dtype=torch.int32), 6, 16, is_sorted=False)
    assert groups.tiles == 12 and not groups.is_sorted
