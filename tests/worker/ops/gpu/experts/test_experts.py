"""Experts in Triton agree with plain PyTorch; a row has the same bits alone, in company, and from separate products."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import close, poisoned, random
from tests.worker.ops.harness.gpu_experts import PLAIN, Format, experts_on_triton, layer_of
from worker.ops.activation.reference import GATED
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import linear_torch
from worker.ops.moe.packed import Experts
from worker.ops.moe.reference import choose_experts, experts_torch
from worker.ops.quantized_weight import E2M1, E4M3, INT4, INT8
from worker.spec import Activation

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
FORMATS = {
    "plain": PLAIN,
    "int8 rows": Format(kind="int8"),
    "fp8 dynamic": Format(kind="fp8", dynamic=True),
    "int8": Format(INT8, 32),
    "e4m3": Format(E4M3, 1 << 20),
    "int4": Format(INT4, 128),
    "mxfp4": Format(E2M1, 32),
}
COUNT, CHOSEN, HIDDEN = 5, 2, 132


def run(h: Tensor, layer: Experts, chosen: int = CHOSEN, activation: Activation = "silu", **how: Any) -> Tensor:
    with poisoned():
        return experts_on_triton(h, layer, chosen, activation, **({"normalized": True} | how))


def torch_logits(h: Tensor, layer: Experts) -> Tensor:
    return linear_torch(h, layer.router, fp32_out=True)


def kinds(device: str) -> list[tuple[Format, int, torch.dtype, int]]:
    """Returns (format, intermediate size, dtype, number of rows): each format with two intermediate sizes.

    One intermediate size is a multiple of the tile. For each format, one has few rows, so that each slot has its own
    tile, and the other has many rows, whose slots are grouped. Which one has many rows alternates between formats.
    """
    dtypes = [torch.float16, torch.float32] if device == "cpu" else [torch.float16, torch.bfloat16]
    return [
        (format, inner, dtypes[(at // 2 + part) % 2], sizes[(at + part) % 2])
        for at, format in enumerate(FORMATS.values())
        for part, (inner, sizes) in enumerate(((64, (1, 40)), (40, (2, 7))))
    ]


def test_experts_triton_agrees_with_torch(device: str) -> None:
    for format, inner, dtype, rows in kinds(device):
        layer = layer_of(COUNT, HIDDEN, inner, format, dtype=dtype, device=device)
        h = random(rows, HIDDEN, dtype=dtype, device=device)
        close(run(h, layer), experts_torch(h, layer, CHOSEN, "silu", normalized=True))


@pytest.mark.parametrize(
    ("format", "activation"),
    [
        *((PLAIN, activation) for activation in GATED),
        *((FORMATS[name], activation) for name in ("int8 rows", "mxfp4") for activation in (GATED[0], GATED[-1])),
    ],
)
def test_biases_activations_and_a_shared_expert_agree_with_torch(
    format: Format, activation: Activation, device: str
) -> None:
    layer = layer_of(COUNT, HIDDEN, 64, format, dtype=torch.float16, device=device, bias=True)
    for rows, normalized in ((2, True), (9, False)):
        h, add = (random(rows, HIDDEN, dtype=torch.float16, device=device, seed=seed) * 4 for seed in (1, 2))
        how: dict[str, Any] = {"normalized": normalized, "add": add}
        if normalized:
            how["add_gate"] = random(rows, 1, device=device)
        close(run(h, layer, CHOSEN, activation, **how), experts_torch(h, layer, CHOSEN, activation, **how))


@pytest.mark.parametrize("name", ["plain", "int8 rows", "int4", "mxfp4"])
def test_experts_without_a_gate_agree_with_torch(name: str, device: str) -> None:
    half, whole = (
        layer_of(COUNT, HIDDEN, inner, FORMATS[name], dtype=torch.float16, device=device) for inner in (32, 64)
    )
    layer = replace(half, down=whole.down)  # the outputs of gate_up are as many as the inputs of down
    for rows in (1, 9):
        h = random(rows, HIDDEN, dtype=torch.float16, device=device)
        expected = experts_torch(h, layer, CHOSEN, "relu2", normalized=True, gated=False)
        close(run(h, layer, CHOSEN, "relu2", gated=False), expected)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_every_expert_may_be_chosen(count: int, device: str) -> None:
    layer = layer_of(count, 48, 20, device=device)
    for rows in (1, 5):
        h = random(rows, 48, device=device)
        close(run(h, layer, count), experts_torch(h, layer, count, "silu", normalized=True))


def chosen_by(layer: Experts, numbers: list[int]) -> Experts:
    """Returns the layer with a router that prefers experts in the order of `numbers`, for all rows."""
    logits = torch.zeros(len(numbers), device=layer.router.weight.device)
    for place, number in enumerate(numbers):
        logits[number] = len(numbers) - place
    return replace(layer, router=PackedLinear(torch.zeros_like(layer.router.weight), logits, True))


@pytest.mark.parametrize("format", [PLAIN, FORMATS["int4"]])
def test_all_rows_may_choose_the_same_experts(format: Format, device: str) -> None:
    """One expert then has several tiles, and most experts have none."""
    layer = chosen_by(layer_of(COUNT, HIDDEN, 64, format, device=device), [4, 1, 0, 2, 3])
    h = random(40, HIDDEN, device=device)
    close(run(h, layer, 1, normalized=False), experts_torch(h, layer, 1, "silu", normalized=False))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_bits_of_a_row_do_not_depend_on_the_others(format: Format, device: str) -> None:
    """A row alone has a tile for each of its slots. With other rows, slots are grouped in tiles of 16 or 32 rows."""
    layer = layer_of(COUNT, HIDDEN, 64, format, dtype=torch.float16, device=device)
    h = random(45, HIDDEN, dtype=torch.float16, device=device)
    whole = run(h, layer)
    for begin, end in ((0, 1), (20, 26)):
        assert torch.equal(run(h[begin:end], layer), whole[begin:end])


def test_steps_with_many_slots_are_computed_in_parts_with_the_same_bits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.ops.moe import triton as experts

    layer, h = layer_of(COUNT, HIDDEN, 64, device=device), random(19, HIDDEN, device=device)
    add, gate = random(19, HIDDEN, device=device, seed=5), random(19, 1, device=device, seed=6)
    whole = run(h, layer, add=add, add_gate=gate)
    monkeypatch.setattr(experts, "MAX_SLOTS", 8 * CHOSEN + 1)
    assert torch.equal(run(h, layer, add=add, add_gate=gate), whole)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_bits_are_those_of_the_linear_kernels_and_a_sum_in_the_order_of_the_slots(format: Format, device: str) -> None:
    """The weights are so small that `linear` does not split their K, as the kernels of experts never do."""
    layer = layer_of(COUNT, HIDDEN, 64, format, dtype=torch.float16, device=device, bias=True)
    h = random(3, HIDDEN, dtype=torch.float16, device=device)
    found = run(h, layer, 3)
    from worker.ops.moe.triton_routing import choose_experts_triton

    numbers, weights = choose_experts_triton(logits_triton(h, layer), 3, normalized=True)
    for row, slots in enumerate(numbers.tolist()):
        total = torch.zeros(HIDDEN, device=device)
        for slot, number in enumerate(slots):
            inner = linear_bits(h[row : row + 1], layer.gate_up.expert(number), fp32_out=False)
            total += weights[row, slot] * linear_bits(gated(inner), layer.down.expert(number), fp32_out=True)[0]
        assert torch.equal(found[row], total.half())


def logits_triton(h: Tensor, layer: Experts) -> Tensor:
    return linear_bits(h, layer.router, fp32_out=True)


def gated(x: Tensor) -> Tensor:
    from worker.ops.activation.triton import act_and_mul_triton

    return act_and_mul_triton(x, "silu")


def linear_bits(x: Tensor, packed: PackedLinear, *, fp32_out: bool) -> Tensor:
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_low_bit import quantized_linear_triton

    if packed.codes:
        codes = [replace(part, scale=part.scale.contiguous()) for part in packed.codes]
        return quantized_linear_triton(x, codes, packed.bias, fp32_out=fp32_out)
    return linear_triton(x, packed.weight, packed.bias, packed.scale, dynamic=packed.dynamic, fp32_out=fp32_out)


def test_loads_count_how_many_rows_chose_each_expert(device: str) -> None:
    layer, h = layer_of(COUNT, 48, 20, device=device), random(9, 48, device=device)
    counted = replace(layer, loads=torch.full((COUNT,), 100, device=device))
    assert torch.equal(run(h, counted), run(h, layer))
    numbers, _ = choose_experts(torch_logits(h, layer), CHOSEN, normalized=True)
    assert counted.loads is not None
    assert (counted.loads - 100).tolist() == numbers.flatten().bincount(minlength=COUNT).tolist()
