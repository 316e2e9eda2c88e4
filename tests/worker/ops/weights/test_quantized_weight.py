import pytest
import torch

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.quantized import CODE_MAPS, quantized
from worker.ops.linear import linear
from worker.ops.linear.packed import pack_stacked
from worker.ops.quantized_weight import INT4, INT8, CodeMap, QuantizedWeight, quantize_groups, stack


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("group_size", [16, 32, 80, 128])
@pytest.mark.parametrize("code_map", CODE_MAPS, ids=lambda code_map: code_map.name)
def test_a_number_is_its_value_times_its_groups_scale_plus_its_minimum(
    code_map: CodeMap, group_size: int, minimum: bool
) -> None:
    weight = quantized(code_map, group_size=group_size, minimum=minimum)
    full = weight.dequantize(torch.float32)
    for n, k in [(0, 0), (3, 31), (5, 79), (2, 48)]:
        group = k // group_size
        number = torch.tensor(code_map.values[int(weight.codes[n, k])]) * weight.scale[n, group]
        assert full[n, k] == (number if weight.minimum is None else number + weight.minimum[n, group])


def test_input_order_says_which_input_a_code_belongs_to() -> None:
    plain, order = quantized(INT4, minimum=False), torch.randperm(80, generator=torch.Generator().manual_seed(1))
    ordered = QuantizedWeight(plain.codes, INT4, plain.scale, None, 32, order)
    assert torch.equal(ordered.dequantize(torch.float32)[:, order], plain.dequantize(torch.float32))


def test_stacked_rows_keep_their_numbers_and_formats() -> None:
    parts = [quantized(INT4, minimum=False), quantized(INT4, n=3, minimum=False), quantized(INT8, n=2, minimum=False)]
    stacked = stack(parts)
    assert [weight.shape for weight in stacked] == [(9, 80), (2, 80)]
    full = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(torch.cat([weight.dequantize(torch.float32) for weight in stacked]), full)
    assert len(stack([parts[0], quantized(INT4, minimum=True)])) == 2


@pytest.mark.parametrize(
    ("code_map", "group_size", "largest"), [(INT8, 128, 0.008), (INT4, 128, 0.13), (INT4, 32, 0.11)]
)
def test_quantizing_keeps_a_weight_within_its_step(code_map: CodeMap, group_size: int, largest: float) -> None:
    weight = random(40, 300)
    kept = quantize_groups(weight, code_map, group_size)
    full = kept.dequantize(torch.float32)
    assert torch.equal(kept.scale.bfloat16().float(), kept.scale)
    assert ((full - weight).norm() / weight.norm()).item() < largest
    assert not quantize_groups(torch.zeros(2, 64), code_map, 32).dequantize(torch.float32).any()


def test_a_clipped_scale_is_chosen_where_it_serves_the_group_better() -> None:
    weight = torch.cat((torch.full((1, 31), 0.9), torch.tensor([[8.0]])), dim=1)
    scale = quantize_groups(weight, INT4, 32).scale
    assert 0.5 * 8 / 7 < scale.item() <= 8 / 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    parts = [quantized(INT4, n=40, minimum=True), quantized(INT8, n=24, minimum=False)]
    x, bias = random(5, 80).to(dtype), random(64, seed=2).to(dtype)
    full = torch.cat([part.dequantize(torch.float32) for part in parts])
    expected = x.float() @ full.T + bias.float()
    y = linear(x, pack_stacked(parts, bias, dtype=dtype, invariant=True))
    error = ((y.float() - expected).norm() / expected.norm()).item()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)
